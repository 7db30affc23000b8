"""Covering sets: every pair of levels of any two factors occurs together in at least one case."""

from __future__ import annotations

import itertools
import random
from typing import Any


def pairwise(factors: dict[str, list[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Greedy covering set of strength two, the same at every run."""
    rng = random.Random(seed)
    names = list(factors)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    cases = []
    while missing:
        best: dict[str, int] = {}
        best_new = -1
        seeds = sorted(missing)
        for _ in range(40):
            (a, i), (b, j) = seeds[rng.randrange(len(seeds))]
            row = {name: rng.randrange(len(factors[name])) for name in names}
            row[a], row[b] = i, j
            new = sum(p in missing for p in _pairs(row, names))
            if new > best_new:
                best, best_new = row, new
        missing -= set(_pairs(best, names))
        cases.append({name: factors[name][best[name]] for name in names})
    return cases


def _pairs(row: dict[str, int], names: list[str]) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    return [((a, row[a]), (b, row[b])) for a, b in itertools.combinations(names, 2)]


def full(factors: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Every combination."""
    return [dict(zip(factors, levels, strict=True)) for levels in itertools.product(*factors.values())]


def name(case: dict[str, Any]) -> str:
    """Readable test id."""
    return "-".join(f"{key}={str(value).replace('torch.', '')}" for key, value in case.items())
