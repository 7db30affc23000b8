"""Generated tokens a second of servers that differ in their policy only."""

from __future__ import annotations

import functools
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from witcert_demo.servers import Server, running_server

from bench.common.speed import CLIENTS, NEW, POLICIES, fresh_prompts, in_turn


def generate(server: Server, ids: list[int]) -> int:
    """Tokens generated for one prompt."""
    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}}
    with server.client() as client:
        reply = client.post("/generate", json=body).raise_for_status().json()
    return int(reply["meta_info"]["completion_tokens"])


def tokens_per_second(server: Server, seed: int) -> float:
    prompts = fresh_prompts(seed)
    begun = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        tokens = sum(pool.map(functools.partial(generate, server), prompts))
    return tokens / (time.perf_counter() - begun)


def measure(model: Path, work: Path, rounds: int) -> list[dict[str, Any]]:
    """One row a policy."""
    with ExitStack() as stack:
        engines = {}
        for number, (name, policy) in enumerate(POLICIES.items()):
            path = None
            if policy is not None:
                path = work / f"{number}.yaml"
                path.write_text(yaml.safe_dump({"version": 1, **policy}))
            options = ["--dtype", "float32", "--sleep-on-idle", "--disable-radix-cache"]
            context = running_server(model, policy=path, log=work / f"{number}.log", options=options)
            engines[name] = functools.partial(tokens_per_second, stack.enter_context(context))
        return in_turn(engines, rounds)
