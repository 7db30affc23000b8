"""`make bench-cpu`: attention over a cache on this processor, ours beside other kernels; in vLLM's environment.

Writes bench/cpu/results.json and results.md. Every shape's contestants take turns in one process, and the fastest of
their rounds counts. `--quick` measures a corner of the table, and writes only where `--out` says.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.cpu import ours, peers
from bench.cpu.case import Call, Case
from bench.cpu.page import CERTIFY, METERED, PLAIN, page
from witcert_core.quantizers.layout import KVLayout

GIB = 2**30
PEERS: dict[str, tuple[int, peers.Maker]] = {
    "vLLM bf16": (2, peers.vllm("auto")),
    "vLLM fp8": (1, peers.vllm("fp8_e4m3")),
    "SDPA bf16": (2, peers.sdpa(torch.bfloat16)),
    "SDPA fp32": (4, peers.sdpa(torch.float32)),
}
"""Name -> bytes of a number in its cache, and what makes it; in the order in which memory is given away."""
SECONDS = 4.0
"""For the rounds of one shape, of which there are at least 3 and at most 25."""


def cases(quick: bool) -> list[Case]:
    """All shapes."""
    if quick:
        return [Case(batch, length, 128, 8, 4) for batch, length in ((1, 1024), (1, 4096), (4, 4096))]
    return [
        Case(batch, length, head_dim, kv_heads, 32 // kv_heads)
        for head_dim in (128, 64)
        for kv_heads in (8, 4)
        for length in (1024, 4096, 16384, 65536)
        for batch in (1, 4, 16)
    ]


def contestants(case: Case, room: int) -> tuple[dict[str, Call], dict[str, int], list[str]]:
    """Calls by name, the bytes of a cache that each reads, and who was left out and why; `room` in bytes."""
    tokens, calls, size, left = case.tokens, {}, {}, []
    numbers = tokens * 2 * case.head_dim
    for name in (METERED, PLAIN):
        size[name] = tokens * KVLayout(case.head_dim).bytes_per_token_head
    room -= size[PLAIN] * case.sets
    calls[METERED], calls[PLAIN] = ours.packed(case)
    for name, (width, make) in {**PEERS, CERTIFY: (2, ours.simulated)}.items():
        if width * numbers * case.sets > room:
            left.append(f"{name}: the cache does not fit in memory")
            continue
        try:
            calls[name] = make(case)
        except ImportError as missing:
            left.append(f"{name}: {missing}")
            continue
        size[name] = width * numbers
        room -= width * numbers * case.sets
    return calls, size, left


def fastest(calls: dict[str, Call], sets: int) -> dict[str, float]:
    """Seconds of each, the fastest of rounds in which all take turns; a cache is read again after all others."""
    # Of the processor's own time where one thread does all: what else runs on the machine then counts less.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for call in calls.values():
        call(0)
    found = {name: float("inf") for name in calls}
    began = time.monotonic()
    for turn in range(25):
        for index, (name, call) in enumerate(calls.items()):
            # Two contestants may read the same memory: not what the other has just read.
            before = clock()
            call((turn + 1 + index * sets // len(calls)) % sets)
            found[name] = min(found[name], clock() - before)
        if turn >= 2 and time.monotonic() - began > SECONDS:
            break
    return found


def bandwidth() -> float:
    """Bytes a second at which memory is read, by the fastest of sums over half a gigabyte."""
    source = torch.ones(2**27)
    times = fastest({"sum": lambda s: source.sum()}, 1)
    return 4 * source.numel() / times["sum"]


def writing(tokens: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    append, copy = ours.writers(tokens, kv_heads, head_dim)
    times = fastest({"append": lambda s: append(), "copy": lambda s: copy()}, 1)
    return {"tokens": tokens, "kv_heads": kv_heads, "head_dim": head_dim, "seconds": times}


def processor() -> str:
    """As the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def measured(quick: bool, room: int, say: Callable[[str], None]) -> dict[str, Any]:
    rows = []
    for case in cases(quick):
        calls, size, left = contestants(case, room)
        times = fastest(calls, case.sets)
        own = {"batch": case.batch, "length": case.length, "head_dim": case.head_dim, "kv_heads": case.kv_heads}
        rows.append({**own, "group": case.group, "seconds": times, "bytes": size, "left_out": left})
        say(f"{own}: " + ", ".join(f"{name} {1e3 * t:.3f} ms" for name, t in times.items()))
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "memory_bytes_per_second": bandwidth(),
        "attention": rows,
        "writing": [writing(tokens, 8, 128) for tokens in (1, 16, 1024)],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three shapes; writes nothing unless --out is given")
    parser.add_argument("--out", type=Path, help="the page to write, its figures beside it as .json")
    parser.add_argument("--memory", type=float, default=9.0, help="GiB that the caches of a shape may take (default 9)")
    options = parser.parse_args(arguments)
    results = measured(options.quick, int(options.memory * GIB), lambda line: print(line, flush=True))
    out = options.out or (None if options.quick else Path(__file__).with_name("results.md"))
    text = page(results)
    print(text)
    if out is not None:
        out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        out.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
