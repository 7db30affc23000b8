"""`witcert eval trust`: how loose the bound is where it matters, and whether its ranking finds the lost answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from witcert_core.evaluate.cells import METER, TAU, WITNESS, CellTable, finite_or_word
from witcert_core.evaluate.forcing import Forced
from witcert_core.evaluate.plots import figure
from witcert_core.evaluate.stats import auroc_interval
from witcert_core.evaluate.tables import interval

SCHEMA = "witcert.trust/1"
TV_BINS = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.05, 0.2, 1.0)
MOST_POINTS = 1500
TRUTH = "true_tv_mean"


def trust_of(
    table: CellTable, outcomes: Sequence[Forced], exact: Sequence[Forced], options: Mapping[str, int]
) -> dict[str, Any]:
    """Of one quantizer, deterministic tier: looseness by true TV, what the meter's verdicts were worth, ranking.

    Of the cells that read something quantized; violations are counted in all.
    """
    every, table = table, table.measured()
    above = every.tv > every.bounds[WITNESS][METER]
    meter = table.bounds[WITNESS][METER]
    lost = lost_answers(outcomes, exact)
    return {
        "cells": len(table),
        "cells_exact": len(every) - len(table),
        "violations": int((above | (every.tv < every.floor)).sum()),
        "looseness": looseness(meter, table.tv),
        "verdicts": verdicts(meter, table.floor, table.tv),
        "samples": len(outcomes),
        "lost": sum(lost),
        "ranking": ranking(ranking_scores(table, len(outcomes)), lost, options),
        "points": points(meter, table.tv),
    }


def lost_answers(outcomes: Sequence[Forced], exact: Sequence[Forced]) -> list[bool]:
    """Answers that greedy decoding writes from the exact cache and not from this one."""
    return [known.right and not found.right for known, found in zip(exact, outcomes, strict=True)]


def ranking(scores: Mapping[str, list[float]], lost: list[bool], options: Mapping[str, int]) -> dict[str, Any]:
    """AUROC of each score against the lost answers; None where all or none is lost."""
    found = {name: auroc_interval(score, lost, **options) for name, score in scores.items()}
    return {name: None if area is None else area.as_dict() for name, area in found.items()}


def pooled(
    parts: Sequence[tuple[CellTable, Sequence[Forced]]], exact: Sequence[Forced], options: Mapping[str, int]
) -> dict[str, Any]:
    """The ranking over the samples of several caches together: does the score say which cache loses which answer?"""
    lost: list[bool] = []
    scores: dict[str, list[float]] = {}
    for table, outcomes in parts:
        lost += lost_answers(outcomes, exact)
        for name, score in ranking_scores(table.measured(), len(outcomes)).items():
            scores[name] = scores.get(name, []) + score
    return {"samples": len(lost), "lost": sum(lost), "ranking": ranking(scores, lost, options)}


def looseness(meter: Tensor, tv: Tensor) -> list[dict[str, Any]]:
    """Of cells [C], by bins of the true TV: how many, quantiles of meter / TV, and the share bounded by 1 alone."""
    rows = []
    for low, high in pairwise(TV_BINS):
        inside = (tv > low) & (tv <= high) if low > 0 else tv <= high
        some = inside & (tv > 0)
        ratio = meter[some] / tv[some]
        points = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
        quantiles = torch.quantile(ratio, points) if ratio.numel() else None
        rows.append(
            {
                "tv_above": low,
                "tv_at_most": high,
                "cells": int(inside.sum()),
                "ratio": None if quantiles is None else [finite_or_word(x) for x in quantiles.tolist()],
                "says_nothing": float((meter[inside] >= 1).double().mean()) if bool(inside.any()) else None,
            }
        )
    return rows


def verdicts(meter: Tensor, floor: Tensor, tv: Tensor) -> dict[str, Any]:
    """Of the cells [C] within tau, those certified; of those above it, the certified (none) and the proved damaged.

    A cell that is neither certified nor proved damaged is one the meter leaves open.
    """
    harmless, certified = tv <= TAU, meter <= TAU
    return {
        "tau": TAU,
        "harmless": int(harmless.sum()),
        "harmless_certified": int((harmless & certified).sum()),
        "damaged": int((~harmless).sum()),
        "damaged_certified": int((~harmless & certified).sum()),
        "damaged_proved": int((floor > TAU).sum()),
    }


def ranking_scores(table: CellTable, num_samples: int) -> dict[str, list[float]]:
    """One number a sample: largest and mean `log A`, the shares not certified and proved damaged; and, which no meter
    knows, the mean of the true TV: no ranking by attention can be expected to do better."""
    columns = {
        "log_a_mean": table.log_a,
        "uncertified_share": (table.bounds[WITNESS][METER] > TAU).double(),
        "damaged_share": (table.floor > TAU).double(),
        TRUTH: table.tv,
    }
    owned = [table.sample == number for number in range(num_samples)]
    largest = [float(table.log_a[own].max()) if bool(own.any()) else 0.0 for own in owned]
    means = {
        name: [float(column[own].mean()) if bool(own.any()) else 0.0 for own in owned]
        for name, column in columns.items()
    }
    return {"log_a_max": largest, **means}


def points(meter: Tensor, tv: Tensor) -> dict[str, list[float]]:
    """Of cells [C] those for the plot, evenly picked when there are many; the same ones every time."""
    step = max(1, -(-len(tv) // MOST_POINTS))
    return {"tv": [round(x, 9) for x in tv[::step].tolist()], "meter": [round(x, 9) for x in meter[::step].tolist()]}


TRUST_COLUMNS = (
    "KV cache",
    "cells",
    "violations",
    "within tau, certified",
    "above tau: certified, proved",
    "meter / TV at TV .01 to .2",
    "answers lost",
    "AUROC of largest log A",
    "AUROC of mean log A",
    "AUROC of the uncertified share",
    "AUROC of the damaged share",
    "AUROC of the true TV",
)


def trust_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """A line a quantizer, and one for all of them together."""
    rows = []
    for name, result in found["quantizers"].items():
        said = result["verdicts"]
        ratios = [row["ratio"] for row in result["looseness"] if row["tv_above"] in (0.01, 0.05) and row["ratio"]]
        rows.append(
            [
                name,
                str(result["cells"]),
                str(result["violations"]),
                f"{said['harmless_certified']} of {said['harmless']}",
                f"{said['damaged_certified']}, {said['damaged_proved']} of {said['damaged']}",
                " and ".join(f"{ratio[1]:.1f}" for ratio in ratios) or "-",
                f"{result['lost']} of {result['samples']}",
                *(interval(area) for area in result["ranking"].values()),
            ]
        )
    every = found["pooled"]
    lost = f"{every['lost']} of {every['samples']}"
    return [*rows, ["all together", *["-"] * 5, lost, *(interval(area) for area in every["ranking"].values())]]


def plot_trust(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Bound against true TV, a point a cell, on logarithmic axes; nothing may lie below the diagonal."""
    with figure(path, columns=len(results), size=(3.6, 3.4)) as axes:
        for ax, (name, result) in zip(axes[0], results.items(), strict=True):
            shown = result["points"]
            ax.loglog([1e-7, 1], [1e-7, 1], color="#333333", linewidth=0.8)
            x = [max(tv, 1e-7) for tv in shown["tv"]]
            ax.scatter(x, shown["meter"], s=3, alpha=0.35, color="#1a5276", linewidths=0, rasterized=True)
            ax.axhline(TAU, color="#999999", linewidth=0.8)
            ax.axvline(TAU, color="#999999", linewidth=0.8)
            ax.set_title(name)
            ax.set_xlabel("true TV")
        axes[0][0].set_ylabel("meter (deterministic tier)")
