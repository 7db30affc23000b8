"""Correctness, then speed, of every kernel on the GPU at hand; see ``gpu.sh``."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DRY_RUN = "--dry-run" in sys.argv
if DRY_RUN:
    # Triton reads it at import.
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402

from bench.gpu_correct import KEY, LAYER, check_dtype  # noqa: E402
from bench.gpu_peers import PAGE, PEERS  # noqa: E402
from witcert_core.cache.bands import band_map  # noqa: E402
from witcert_core.kernels.append import append_int8  # noqa: E402
from witcert_core.kernels.decode import Workspace, decode_int8  # noqa: E402
from witcert_core.kernels.host.pages import PageTable  # noqa: E402
from witcert_core.kernels.witness import record_witness  # noqa: E402
from witcert_core.quantizers.dither import num_groups  # noqa: E402
from witcert_core.quantizers.layout import KVLayout  # noqa: E402
from witcert_core.quantizers.rotary import RotarySpec  # noqa: E402

DEVICE = torch.device("cpu" if DRY_RUN else "cuda")
HEADS, KV_HEADS, DIM = (4, 1, 64) if DRY_RUN else (32, 8, 128)
BATCHES = (2,) if DRY_RUN else (1, 16, 64)
LENGTHS = (32,) if DRY_RUN else (4096, 32768, 131072)
COLD_BYTES = 2**10 if DRY_RUN else 2**28
"""Working set below which several are rotated, so that no measurement reads the L2 cache."""
LAST_START = 290.0
"""Seconds after which no further measurement begins; the whole must end within 360."""


class Replay:
    """A call captured in a CUDA graph; in a dry run, the call itself."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        if DRY_RUN:
            return
        # Once outside: a kernel is compiled at its first launch, which cannot be captured.
        call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            call()

    def run(self) -> None:
        self.call() if DRY_RUN else self.graph.replay()

    def timed(self) -> float:
        """Seconds of one replay."""
        if DRY_RUN:
            began = time.perf_counter()
            self.run()
            return time.perf_counter() - began
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def seconds(call: Callable[[int], object], sets: int) -> float:
    """Median time of one call over replays of a CUDA graph that goes once through all sets."""
    replay = Replay(lambda: [call(s) for s in range(sets)])
    if not DRY_RUN:
        replay.run()
    times = [replay.timed() / sets for _ in range(1 if DRY_RUN else 15)]
    return sorted(times)[len(times) // 2]


def copy_bandwidth() -> float:
    """Bytes per second of a large device copy, read and written bytes both counted."""
    size = 2**16 if DRY_RUN else 2**30
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda s: target.copy_(source), 1)


def fits(nbytes: int) -> bool:
    return DRY_RUN or nbytes < 0.9 * torch.cuda.mem_get_info()[0]


def int8_points(batch: int, length: int, bandwidth: float) -> list[dict[str, Any]]:
    """INT8 decode, certified and not."""
    per_token = KV_HEADS * KVLayout(DIM).bytes_per_token_head
    sets = max(1, math.ceil(COLD_BYTES / (batch * length * per_token)))
    pages = batch * (length // PAGE)
    total, groups = sets * pages, num_groups(DIM)
    if not fits(total * PAGE * per_token):
        return [{"kernel": "INT8", "skipped": "does not fit in memory"}]
    shape = (total, PAGE, KV_HEADS)
    codes = [torch.randint(-127, 128, (*shape, DIM), dtype=torch.int8, device=DEVICE) for _ in range(2)]
    scales = [(torch.rand(*shape, groups, device=DEVICE) * 0.02 + 0.01).half() for _ in range(2)]
    pass_ids = torch.full((total * PAGE,), 5, dtype=torch.int32, device=DEVICE)
    q = torch.randn(batch, HEADS, DIM, device=DEVICE).to(torch.float16 if DRY_RUN else torch.bfloat16)
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * (length // PAGE)
    last = torch.full((batch,), PAGE, dtype=torch.int32, device=DEVICE)
    order = torch.randperm(total, device=DEVICE).to(torch.int32)
    tables = [PageTable(indptr, order[s * pages : (s + 1) * pages].contiguous(), last) for s in range(sets)]
    counters = torch.zeros(LAYER + 1, dtype=torch.int64, device=DEVICE)
    options: dict[str, Any] = {
        "layer": LAYER,
        "head_ids": torch.arange(KV_HEADS, dtype=torch.int32, device=DEVICE),
        "key": KEY,
        "max_kv_len": length,
        "workspace": Workspace.allocate(batch, HEADS, DIM, length, DEVICE),
        "out": torch.empty_like(q),
        "lse": torch.empty(batch, HEADS, device=DEVICE),
        "acc": torch.empty(batch, HEADS, 16, device=DEVICE),
        "delta_loc": torch.full((batch,), 1e-8, device=DEVICE),
        "counters": counters,
    }
    points = []
    for name, meter in (("INT8 certified", True), ("INT8 uncertified", False)):

        def attend(s: int, meter: bool = meter) -> object:
            return decode_int8(
                q, (codes[0], codes[1]), scales[0], scales[1], tables[s], pass_ids, meter=meter, **options
            )

        taken = seconds(attend, sets)
        share = batch * length * per_token / taken / bandwidth
        points.append({"kernel": name, "seconds": taken, "share_of_copy": share})
    return points


def peer_points(batch: int, length: int, bandwidth: float) -> list[dict[str, Any]]:
    """16-bit decode of the same shape."""
    size = batch * length * KV_HEADS * DIM * 2 * 2
    sets = max(1, math.ceil(COLD_BYTES / size))
    dtype = torch.float16 if DRY_RUN else torch.bfloat16
    if not fits(sets * size):
        return [{"kernel": "16-bit", "skipped": "does not fit in memory"}]
    k, v = (torch.empty(sets * batch * length, KV_HEADS, DIM, dtype=dtype, device=DEVICE).normal_() for _ in range(2))
    q = torch.randn(batch, HEADS, DIM, device=DEVICE).to(dtype)
    points: list[dict[str, Any]] = []
    for name, maker in PEERS.items():
        if DRY_RUN and name == "FlashInfer 16-bit":
            points.append({"kernel": name, "skipped": "no interpreter for it"})
            continue
        try:
            attend = maker(q, k, v, batch, length)
            taken = seconds(attend, sets)
        except (ImportError, AttributeError, TypeError, RuntimeError) as problem:
            # A peer that is absent or has changed its interface must not cost us our own figures; it is
            # named.
            reason = f"{type(problem).__name__}: {str(problem).splitlines()[0][:80] if str(problem) else ''}"
            points.append({"kernel": name, "skipped": reason})
            continue
        points.append({"kernel": name, "seconds": taken, "share_of_copy": size / taken / bandwidth})
    return points


def write_points(bandwidth: float) -> list[dict[str, Any]]:
    """Append and witness path, as shares of the copy bandwidth."""
    tokens = 32 if DRY_RUN else 65536
    dtype = torch.float16 if DRY_RUN else torch.bfloat16
    groups, pages = num_groups(DIM), tokens // PAGE
    shape = (pages, PAGE, KV_HEADS)
    k, v = (torch.randn(tokens, KV_HEADS, DIM, device=DEVICE).to(dtype) for _ in range(2))
    codes = [torch.empty(*shape, DIM, dtype=torch.int8, device=DEVICE) for _ in range(2)]
    scales = [torch.empty(*shape, groups, dtype=torch.float16, device=DEVICE) for _ in range(2)]
    pass_ids = torch.full((tokens,), 9, dtype=torch.int32, device=DEVICE)
    slots = torch.randperm(tokens, device=DEVICE)
    head_ids = torch.arange(KV_HEADS, dtype=torch.int32, device=DEVICE)

    def append(s: int) -> None:
        append_int8(
            k,
            v,
            (codes[0], codes[1]),
            scales[0],
            scales[1],
            pass_ids,
            layer=LAYER,
            head_ids=head_ids,
            dither_key=KEY,
            slot_mapping=slots,
        )

    bands = band_map(RotarySpec(DIM))
    norms = torch.empty(tokens, KV_HEADS, bands.num_bands, dtype=torch.uint8, device=DEVICE)
    value_norms = torch.empty(tokens, KV_HEADS, dtype=torch.uint8, device=DEVICE)

    def witness(s: int) -> object:
        record_witness(k, v, k, v, norms, value_norms, slots, bands)
        return None

    packed = tokens * KV_HEADS * (4 * DIM + KVLayout(DIM).bytes_per_token_head)
    recorded = tokens * KV_HEADS * (8 * DIM + bands.num_bands + 1)
    points = []
    for name, call, nbytes in (("append", append, packed), ("record", witness, recorded)):
        taken = seconds(call, 1)
        points.append({"kernel": name, "seconds": taken, "share_of_copy": nbytes / taken / bandwidth})
    return points


def graph_check() -> dict[str, Any]:
    """Eager equals replay bitwise, and the counter advances with every replay."""
    points: dict[str, Any] = {}
    batch, length = (2, 32) if DRY_RUN else (4, 2048)
    pages = batch * length // PAGE
    shape = (pages, PAGE, KV_HEADS)
    codes = [torch.randint(-127, 128, (*shape, DIM), dtype=torch.int8, device=DEVICE) for _ in range(2)]
    scales = [(torch.rand(*shape, num_groups(DIM), device=DEVICE) * 0.02).half() for _ in range(2)]
    table = PageTable(
        torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * (length // PAGE),
        torch.arange(pages, dtype=torch.int32, device=DEVICE),
        torch.full((batch,), PAGE, dtype=torch.int32, device=DEVICE),
    )
    q = torch.randn(batch, HEADS, DIM, device=DEVICE).to(torch.float16 if DRY_RUN else torch.bfloat16)
    counters = torch.zeros(LAYER + 1, dtype=torch.int64, device=DEVICE)
    flag = torch.ones(1, dtype=torch.int32, device=DEVICE)
    points = {name: torch.full((batch, HEADS, n), float("nan"), device=DEVICE) for name, n in (("acc", 16), ("lse", 1))}
    out = torch.full_like(q, float("nan"))
    options: dict[str, Any] = {
        "layer": LAYER,
        "head_ids": torch.arange(KV_HEADS, dtype=torch.int32, device=DEVICE),
        "key": KEY,
        "max_kv_len": length,
        "counters": counters,
        "flag": flag,
        "out": out,
        "lse": points["lse"][..., 0],
        "acc": points["acc"],
        "workspace": Workspace.allocate(batch, HEADS, DIM, length, DEVICE),
        "delta_loc": torch.full((batch,), 1e-8, device=DEVICE),
    }
    arguments = (
        q,
        (codes[0], codes[1]),
        scales[0],
        scales[1],
        table,
        torch.full((pages * PAGE,), 5, dtype=torch.int32, device=DEVICE),
    )
    decode_int8(*arguments, **options)
    eager = (out.clone(), points["acc"].clone())
    graph = Replay(lambda: decode_int8(*arguments, **options))
    before = int(counters[LAYER])
    out.fill_(float("nan"))
    points["acc"].fill_(float("nan"))
    for _ in range(3):
        graph.run()
    measured = int(counters[LAYER]) - before
    same = torch.equal(out, eager[0]) and torch.equal(points["acc"], eager[1])
    flag.zero_()
    graph.run()
    idle = int(counters[LAYER]) - before - measured
    ok = same and measured == 3 * batch * HEADS and idle == 0 and torch.equal(out, eager[0])
    return {
        "check": "graph",
        "ok": ok,
        "detail": f"equal {same}, counted {measured} in 3 replays, {idle} with the flag off",
    }


def goals(points: list[dict[str, Any]]) -> list[str]:
    """Each goal with the figure measured for it."""
    lines = []
    for batch in BATCHES:
        for length in LENGTHS:
            here = {
                p["kernel"]: p
                for p in points
                if p.get("batch") == batch and p.get("length") == length and "seconds" in p
            }
            ours, bare = here.get("INT8 certified"), here.get("INT8 uncertified")
            if ours is None or bare is None:
                continue
            wide = [p["seconds"] for name, p in here.items() if name.endswith("16-bit")]
            speed = f"{min(wide) / ours['seconds']:.2f}x fastest 16-bit" if wide else "no 16-bit"
            cost = 100.0 * (ours["seconds"] / bare["seconds"] - 1.0)
            lines.append(
                f"| {batch} | {length} | {ours['seconds'] * 1e6:.0f} | {speed} | "
                f"{100 * ours['share_of_copy']:.0f} % | {cost:+.1f} % |"
            )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, interpreted on the CPU; writes nothing")
    parser.parse_args()
    if not DRY_RUN and not torch.cuda.is_available():
        print("no GPU here: run on a machine with one, or try --dry-run", file=sys.stderr)
        return 2
    began = time.monotonic()
    card = "interpreter" if DRY_RUN else torch.cuda.get_device_name()
    dtypes = (torch.float16,) if DRY_RUN else (torch.bfloat16, torch.float16)
    lengths = (3, 40) if DRY_RUN else (1, 63, 700, 65)
    checks = [f for dtype in dtypes for f in check_dtype(dtype, lengths, DIM, DEVICE)] + [graph_check()]
    for check in checks:
        mark = "ok " if check["ok"] else "BAD"
        print(mark, f"{check.get('dtype', ''):9} {check['check']:20} {check['detail']}", flush=True)
    bandwidth = copy_bandwidth()
    points = write_points(bandwidth)
    for length in LENGTHS:
        for batch in BATCHES:
            for measure in (int8_points, peer_points):
                if time.monotonic() - began > LAST_START:
                    points.append(
                        {
                            "batch": batch,
                            "length": length,
                            "kernel": measure.__name__,
                            "skipped": "out of time",
                        }
                    )
                    continue
                points += [{"batch": batch, "length": length, **p} for p in measure(batch, length, bandwidth)]
                if not DRY_RUN:
                    torch.cuda.empty_cache()
    day = datetime.date.today().isoformat()
    table = [
        "# Dry run, no timing" if DRY_RUN else f"# Timed on {card}, {day}",
        "",
        f"Written by `bench/gpu.sh`. Copy bandwidth {bandwidth / 1e12:.2f} TB/s; D = {DIM}, "
        f"{HEADS} query heads, {KV_HEADS} KV heads.",
        "",
        "| batch | S | INT8 certified (us) | against 16-bit | of copy bandwidth | certificate |",
        "|---|---|---|---|---|---|",
        *goals(points),
        "",
    ]
    table += [
        f"- {p['kernel']}: {100 * p['share_of_copy']:.0f} % of copy bandwidth" for p in points if "batch" not in p
    ]
    skipped = sorted({f"- skipped {p['kernel']}: {p['skipped']}" for p in points if "skipped" in p})
    failed = [c for c in checks if not c["ok"]]
    table += [*skipped, f"- checks: {len(checks) - len(failed)} of {len(checks)} passed"]
    print("\n".join(table))
    record = {
        "card": card,
        "date": day,
        "copy_bytes_per_s": bandwidth,
        "checks": checks,
        "points": points,
    }
    with tempfile.TemporaryDirectory() as thrown_away:
        folder = Path(thrown_away) if DRY_RUN else Path(__file__).parent
        (folder / "gpu.json").write_text(json.dumps(record, indent=1) + "\n")
        (folder / "gpu.md").write_text("\n".join(table) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
