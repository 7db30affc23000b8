"""Generated tokens a second of servers that differ in their policy only, all up at once and measured in turn.

In turn, so that whatever else the machine does falls on all of them; a server that is not being measured sleeps.
"""

from __future__ import annotations

import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from witcert_demo.servers import Server, running_server
from witcert_demo.vocabulary import FIRST_FILLER, NUM_PER_CLASS

POLICIES: dict[str, dict[str, Any] | None] = {
    "off": None,
    "int8_token_group, stride 32": {"quantizer": {"name": "int8_token_group"}},
    "int8_token_group, stride 1": {"quantizer": {"name": "int8_token_group"}, "meter": {"stride": 1}},
    "int8_dither packed, stride 32": {"quantizer": {"name": "int8_dither", "storage": "packed"}},
}
CLIENTS, PROMPT, NEW = 4, 256, 64


def generate(server: Server, seed: int) -> int:
    """Tokens generated for one fresh prompt."""
    rng = random.Random(seed)
    ids = [FIRST_FILLER + rng.randrange(NUM_PER_CLASS) for _ in range(PROMPT)]
    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}}
    with server.client() as client:
        reply = client.post("/generate", json=body).raise_for_status().json()
    return int(reply["meta_info"]["completion_tokens"])


def tokens_per_second(server: Server, seed: int) -> float:
    begun = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        tokens = sum(pool.map(lambda i: generate(server, seed * CLIENTS + i), range(CLIENTS)))
    return tokens / (time.perf_counter() - begun)


def measure(model: Path, work: Path, rounds: int) -> list[dict[str, Any]]:
    """One row a policy: median tokens a second, and median over the rounds of the ratio to `off` in the same round."""
    with ExitStack() as stack:
        servers = {}
        for number, (name, policy) in enumerate(POLICIES.items()):
            path = None
            if policy is not None:
                path = work / f"{number}.yaml"
                path.write_text(yaml.safe_dump({"version": 1, **policy}))
            options = ["--dtype", "float32", "--sleep-on-idle", "--disable-radix-cache"]
            context = running_server(model, policy=path, log=work / f"{number}.log", options=options)
            servers[name] = stack.enter_context(context)
            tokens_per_second(servers[name], 0)  # warm
        found: dict[str, list[float]] = {name: [] for name in servers}
        for seed in range(1, rounds + 1):
            for name, server in servers.items():
                found[name].append(tokens_per_second(server, seed))
    return [
        {
            "policy": name,
            "tokens_per_second": statistics.median(speeds),
            "ratio": statistics.median(mine / off for mine, off in zip(speeds, found["off"], strict=True)),
            "rounds": rounds,
        }
        for name, speeds in found.items()
    ]
