"""Generated tokens a second under policies that differ in what they meter only, all engines up at once.

Measured in turn, so that whatever else the machine does falls on all of them; one that is not being measured sleeps.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from witcert_demo.vocabulary import FIRST_FILLER, NUM_PER_CLASS

POLICIES: dict[str, dict[str, Any] | None] = {
    "off": None,
    "int8_token_group, stride 32": {"quantizer": {"name": "int8_token_group"}},
    "int8_token_group, stride 1": {"quantizer": {"name": "int8_token_group"}, "meter": {"stride": 1}},
    "int8_dither packed, stride 32": {"quantizer": {"name": "int8_dither", "storage": "packed"}},
}
CLIENTS, PROMPT, NEW = 4, 256, 64
"""Prompts at once, their length, and the tokens to generate for each."""


def fresh_prompts(seed: int) -> list[list[int]]:
    """A prompt a client that no other seed has."""
    rng = random.Random(seed)
    return [[FIRST_FILLER + rng.randrange(NUM_PER_CLASS) for _ in range(PROMPT)] for _ in range(CLIENTS)]


def in_turn(engines: Mapping[str, Callable[[int], float]], rounds: int) -> list[dict[str, Any]]:
    """One row a policy; an engine gives tokens a second for the prompts of a seed.

    Medians of the speeds, and of the ratios to `off` in the same round. The first round of each only warms it up.
    """
    for run in engines.values():
        run(0)
    found: dict[str, list[float]] = {name: [] for name in engines}
    for seed in range(1, rounds + 1):
        for name, run in engines.items():
            found[name].append(run(seed))
    return [
        {
            "policy": name,
            "tokens_per_second": statistics.median(speeds),
            "ratio": statistics.median(mine / off for mine, off in zip(speeds, found["off"], strict=True)),
            "rounds": rounds,
        }
        for name, speeds in found.items()
    ]
