"""Generated tokens a second of eager engines that differ in their policy only."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.common.speed import NEW, POLICIES, fresh_prompts, in_turn
from bench.vllm.engines import Engine, running_engine

OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "enable_prefix_caching": False}


def runner(engine: Engine) -> Callable[[int], float]:
    return lambda seed: float(engine.call("speed", fresh_prompts(seed), NEW))


def measure(model: Path, work: Path, rounds: int) -> list[dict[str, Any]]:
    """One row a policy."""
    with ExitStack() as stack:
        engines = {}
        for number, (name, policy) in enumerate(POLICIES.items()):
            engine = stack.enter_context(running_engine(model, work, f"speed-{number}", policy, **OPTIONS))
            engines[name] = runner(engine)
        return in_turn(engines, rounds)
