"""`witcert eval coverage`: how much each bound certifies, on the same radii."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from witcert_core.evaluate.cells import FORMS, JOINT, METER, TAU, WITNESS, CellTable, coverage, label, violations
from witcert_core.evaluate.plots import figure, plot_lines
from witcert_core.report.text import percent_down

Shares = list[list[float | None]]
SCHEMA = "witcert.coverage/1"
TAUS = tuple(round(0.02 * i, 2) for i in range(1, 51))
DELTAS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-6)
WITNESS_TIER = label(WITNESS)
SHOWN = ("eform", "jensen", "needle", METER, "extremal")
"""The central figure: the published form, the meter and what it is made of, and the supremum for divisible tokens,
which `needle` can undercut: it knows that the heaviest token is one.
"""


def coverage_of(table: CellTable, num_layers: int, num_heads: int) -> dict[str, Any]:
    """Of one quantizer: shares certified by form, over tau and delta, and by layer and head at tau 0.2.

    Shares are of the cells that read something quantized, None of no cell; violations are counted in all.
    """
    every, table = table, table.measured()
    return {
        "cells": len(table),
        "cells_exact": len(every) - len(table),
        "violations": violations(every),
        "tv_max": float(every.tv.max()),
        "by_tau": {
            label(delta): {form: coverage(table.bounds[delta][form], TAUS) for form in FORMS} for delta in table.deltas
        },
        "at_tau": {
            label(delta): {form: coverage(table.bounds[delta][form], [TAU])[0] for form in FORMS}
            for delta in table.deltas
        },
        "by_layer_head": {
            label(delta): {
                form: _by_layer_head(table, table.bounds[delta][form] <= TAU, num_layers, num_heads) for form in FORMS
            }
            for delta in table.deltas
        },
        "over_extremal": {label(delta): _tightness(table.bounds[delta]) for delta in table.deltas},
    }


def _by_layer_head(table: CellTable, certified: Tensor, num_layers: int, num_heads: int) -> Shares:
    place = table.layer * num_heads + table.head
    size = num_layers * num_heads
    count = torch.bincount(place, minlength=size)
    hits = torch.bincount(place, weights=certified.double(), minlength=size)
    shares = (hits / count).view(num_layers, num_heads).tolist()
    return [[None if math.isnan(share) else share for share in layer] for layer in shares]


def _tightness(bounds: Mapping[str, Tensor]) -> dict[str, dict[str, float] | None]:
    """Bound over `extremal`, median and 95 %, where `extremal` says something; None where it never does."""
    best = bounds["extremal"]
    some = (best < 1) & (best > 0)
    if not bool(some.any()):
        return dict.fromkeys(bounds)
    points = torch.tensor([0.5, 0.95], dtype=torch.float64)
    found: dict[str, dict[str, float] | None] = {}
    for form, bound in bounds.items():
        median, high = torch.quantile(bound[some] / best[some], points).tolist()
        found[form] = {"median": median, "q95": high}
    return found


def coverage_rows(results: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """A line for each quantizer and tier: the share certified at tau 0.2 by every form."""
    return [
        [
            name,
            tier,
            *("–" if form == JOINT and tier == WITNESS_TIER else percent_down(forms[form]) for form in FORMS),
            str(sum(result["violations"][tier].values())),
        ]
        for name, result in results.items()
        for tier, forms in result["at_tau"].items()
    ]


COVERAGE_COLUMNS = ("KV cache", "deterministic or delta", *FORMS, "violations")


def plot_coverage(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """The central figure: share certified over tau, a panel a quantizer and tier."""
    panels = []
    for name, result in results.items():
        tiers = [tier for tier in ("deterministic", "0.01") if tier in result["by_tau"]]
        for tier in tiers:
            lines = {form: (TAUS, [percent(x) for x in result["by_tau"][tier][form]]) for form in SHOWN}
            panels.append(
                (
                    f"{name}, {tier if tier == 'deterministic' else f'probabilistic, delta {tier}'}",
                    lines,
                )
            )

    def finish(ax: Any) -> None:
        ax.axvline(TAU, color="#999999", linewidth=0.8)
        ax.set_ylim(-2, 102)

    plot_lines(path, panels, x_label="tau", y_label="cells certified, %", finish=finish)


def plot_deltas(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Share certified at tau 0.2 over the failure probability, for dithered quantizers."""
    panels = []
    for name, result in results.items():
        deltas = [tier for tier in result["at_tau"] if tier != "deterministic"]
        if deltas:
            x = [float(delta) for delta in deltas]
            lines = {form: (x, [percent(result["at_tau"][d][form]) for d in deltas]) for form in SHOWN}
            panels.append((name, lines))
    if panels:
        plot_lines(path, panels, x_label="delta of a request", y_label="cells certified at 0.2, %", x_scale="log")


def plot_heads(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Share certified at tau 0.2 by layer and head, deterministic tier: the published form beside ours."""
    names = list(results)
    with figure(path, columns=len(names), rows=2, size=(3.4, 2.2)) as axes:
        for column, name in enumerate(names):
            for ax, form in zip((row[column] for row in axes), ("eform", METER), strict=True):
                grid = results[name]["by_layer_head"]["deterministic"][form]
                shown = [[math.nan if share is None else share for share in layer] for layer in grid]
                ax.imshow(shown, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
                ax.grid(False)
                ax.set_title(f"{name}: {form}")
                ax.set_ylabel("layer")
                ax.set_yticks(_ticks(len(grid)))
                ax.set_xticks(_ticks(len(grid[0])))
        for ax in axes[-1]:
            ax.set_xlabel("query head")


def percent(share: float | None) -> float:
    """For a plot, which leaves out what is no number."""
    return math.nan if share is None else 100 * share


def _ticks(count: int) -> Sequence[int]:
    return range(0, count, max(1, count // 8))
