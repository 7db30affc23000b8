"""Half an hour of load on real servers, or as long as asked: `python -m bench.sglang.soak --seconds 1800`.

Two servers, one after the other: one that observes, with shared prefixes, and one that repairs, without (a repair of a
shared block rightly changes what its neighbours read). Clients ask at random, break off at random, and the pool holds
only a few of the prompts. What is checked: no request fails; answers are token for token those of the idle server;
no audited cell breaks its bound; every row seen is measured or unknown; the memory of the server's processes levels
off; the copies for repairs take what was announced. Exit code 1 and the reasons if not.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from witcert_demo.run import CHECKPOINT, build_twin
from witcert_demo.servers import Server, running_server
from witcert_demo.tasks import make_samples
from witcert_demo.vocabulary import ASK, COLON, FIRST_KEY, NUM_PER_CLASS

GROWTH_BYTES, GROWTH_SHARE = 48 * 2**20, 0.03
"""What the memory of a server may still grow by in the last third of its time (kept summaries, allocators)."""
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 4, 4, 2, 64


@dataclass
class Outcome:
    """Counts of one phase, and what went wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    rss: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, **counts: int) -> None:
        with self.lock:
            self.counts.update(counts)

    def fail(self, what: str) -> None:
        with self.lock:
            if len(self.failures) < 20:
                self.failures.append(what)


@dataclass(frozen=True)
class Phase:
    """A server and the prompts it is asked. `share`: its part of the time."""

    name: str
    share: float
    model: Path
    policy: dict[str, Any]
    options: tuple[str, ...]
    prompts: list[list[int]]
    clients: int


def shared_prefixes(documents: int, questions: int, num_tokens: int) -> list[list[int]]:
    """Several questions about each of a few documents: prompts that differ in their last three tokens."""
    prompts = []
    for sample in make_samples("multi_key", num_tokens, documents, seed=51):
        context = list(sample.prompt_ids[:-3])
        keys = [token for token in context if FIRST_KEY <= token < FIRST_KEY + NUM_PER_CLASS][:questions]
        prompts += [[*context, ASK, key, COLON] for key in keys]
    return prompts


def phases(work: Path) -> list[Phase]:
    observe = {"quantizer": {"name": "int8_token_group"}, "prefill_reads": "stored"}
    gated = {"quantizer": {"name": "fp8_e4m3_cast"}, "gate": {"kind": "combined"}}
    chunks = ("--chunked-prefill-size", "128", "--enable-mixed-chunk")
    alone = [list(sample.prompt_ids) for sample in make_samples("single_needle", 96, 8, seed=52)]
    return [
        Phase(
            name="observing, shared prefixes",
            share=0.6,
            model=CHECKPOINT,
            policy={**observe, "meter": {"stride": 2, "audit_every": 1, "max_rows": 2}},
            options=("--max-total-tokens", "1536", *chunks),
            prompts=shared_prefixes(documents=8, questions=4, num_tokens=256),
            clients=6,
        ),
        Phase(
            name="repairing, prompts of their own",
            share=0.4,
            model=build_twin(work / "twin"),
            policy={**gated, "meter": {"audit_every": 1}},
            options=("--max-total-tokens", "384", "--disable-radix-cache", *chunks),
            prompts=alone,
            clients=4,
        ),
    ]


def body(prompt: Sequence[int], **sampling: Any) -> dict[str, Any]:
    return {"input_ids": list(prompt), "sampling_params": {"temperature": 0, "max_new_tokens": 12, **sampling}}


def ask(client: httpx.Client, prompt: Sequence[int]) -> dict[str, Any]:
    reply: dict[str, Any] = client.post("/generate", json=body(prompt)).raise_for_status().json()
    return reply


def break_off(client: httpx.Client, prompt: Sequence[int], rng: random.Random, outcome: Outcome) -> None:
    """Start a long answer and leave, politely or not, before or after the first token."""
    request_id = f"soak-{rng.getrandbits(60):x}"
    asked = {**body(prompt, max_new_tokens=200, ignore_eos=True), "rid": request_id, "stream": True}
    with client.stream("POST", "/generate", json=asked) as reply:
        lines = reply.iter_lines()
        for _ in range(rng.randrange(0, 6)):
            next(lines, None)
        if rng.random() < 0.5:
            client.post("/abort_request", json={"rid": request_id}).raise_for_status()
            for _ in lines:
                pass
    outcome.add(broken_off=1)


def check(reply: dict[str, Any], expected: Sequence[int], outcome: Outcome) -> None:
    summary = reply["meta_info"]["witcert"]
    outcome.add(answered=1, cached_tokens=reply["meta_info"]["cached_tokens"], audited_cells=summary["audit"]["cells"])
    outcome.add(retracted=reply["meta_info"]["num_retractions"], repaired_blocks=summary["gate"]["repaired_blocks"])
    if reply["output_ids"] != list(expected):
        outcome.fail(f"answer {reply['output_ids']} under load, {list(expected)} on the idle server")
    for fault in ("violations", "mismatches"):
        if summary["audit"][fault]:
            outcome.fail(f"{summary['audit'][fault]} {fault}: {json.dumps(summary)}")
    counted = sum(summary[name] for name in ("cells_measured", "cells_exact", "cells_unknown"))
    if counted != summary["rows_seen"] * LAYERS * HEADS:
        outcome.fail(f"rows seen are neither measured nor exact nor unknown: {json.dumps(summary)}")


def load(server: Server, phase: Phase, expected: list[list[int]], until: float, number: int, outcome: Outcome) -> None:
    """One client: random questions, a fifth of them broken off."""
    rng = random.Random(number)
    with server.client() as client:
        while time.monotonic() < until and not outcome.failures:
            index = rng.randrange(len(phase.prompts))
            try:
                if rng.random() < 0.2:
                    break_off(client, phase.prompts[index], rng, outcome)
                else:
                    check(ask(client, phase.prompts[index]), expected[index], outcome)
            except httpx.HTTPError as error:
                outcome.fail(f"request failed: {error!r}")


def resident(server: Server) -> int:
    """Bytes resident in the server's processes."""
    total = 0
    main = psutil.Process(server.process.pid)
    for process in [main, *main.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def levels_off(rss: Sequence[int]) -> bool:
    """Whether the last third of the samples stays where the middle third was."""
    third = len(rss) // 3
    before, after = max(rss[third : 2 * third]), max(rss[2 * third :])
    return after - before <= GROWTH_BYTES + GROWTH_SHARE * before


def run(phase: Phase, seconds: float, work: Path) -> Outcome:
    outcome = Outcome()
    policy = work / "policy.yaml"
    policy.write_text(yaml.safe_dump({"version": 1, **phase.policy}))
    options = ("--dtype", "float32", "--max-running-requests", "8", *phase.options)
    with running_server(phase.model, policy=policy, log=work / "log", options=options) as server:
        with server.client() as client:
            expected = [ask(client, prompt)["output_ids"] for prompt in phase.prompts]
            status = client.get("/witcert/status").json()
        until = time.monotonic() + seconds
        with ThreadPoolExecutor(phase.clients) as pool:
            futures = [
                pool.submit(load, server, phase, expected, until, number, outcome) for number in range(phase.clients)
            ]
            while not all(future.done() for future in futures):
                outcome.rss.append(resident(server))
                time.sleep(min(1.0, seconds / 30))
        with server.client() as client:  # still healthy, and idle again
            for prompt, answer in zip(phase.prompts, expected, strict=True):
                check(ask(client, prompt), answer, outcome)
    if not levels_off(outcome.rss):
        outcome.fail(f"memory grows: {[rss >> 20 for rss in outcome.rss[:: max(1, len(outcome.rss) // 12)]]} MiB")
    for needed in ("answered", "broken_off", "audited_cells"):
        if not outcome.counts[needed]:
            outcome.fail(f"nothing was tested: {needed} is 0")
    if phase.policy.get("gate"):
        one_slot = LAYERS * KV_HEADS * 2 * HEAD_DIM * 4
        if status["bytes_copies"] != status["copy_slots"] * one_slot or not outcome.counts["repaired_blocks"]:
            outcome.fail(
                f"copies for repairs: {status['bytes_copies']} bytes, {outcome.counts['repaired_blocks']} used"
            )
    return outcome


def main(seconds: float) -> int:
    failed = False
    with tempfile.TemporaryDirectory(prefix="witcert-soak-") as scratch:
        for phase in phases(Path(scratch)):
            work = Path(scratch) / phase.name.split(",")[0]
            work.mkdir()
            outcome = run(phase, phase.share * seconds, work)
            print(json.dumps({"phase": phase.name, **outcome.counts, "rss_mib": outcome.rss[-1] >> 20}), flush=True)
            for failure in outcome.failures:
                print(f"FAILED: {failure}", flush=True)
            failed |= bool(outcome.failures)
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800.0, help="time under load, both servers together")
    sys.exit(main(parser.parse_args().seconds))
