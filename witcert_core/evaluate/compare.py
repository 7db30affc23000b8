"""From records to the comparison of quantizers: scores with intervals, paired differences, coverage, repairs, ranking.

Every number of the table, the JSON and the plot comes from here.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from witcert_core.evaluate.records import SampleRecord, number
from witcert_core.evaluate.settings import MODES
from witcert_core.evaluate.stats import auroc_interval, mean_interval, paired_difference

SCHEMA = "witcert.comparison/1"


def compare(records: Sequence[SampleRecord], about: Mapping[str, Any], *, resamples: int, seed: int) -> dict[str, Any]:
    """The comparison (schema witcert.comparison/1), by quantizer and mode, over everything and by task and length."""
    options = {"resamples": resamples, "seed": seed}
    groups = _grouped(records)
    exact = _by_sample(record for record in records if record.mode == "exact")
    rows = []
    for (quantizer, mode), group in groups.items():
        raw = _by_sample(groups.get((quantizer, "raw"), []))
        rows.append(
            {
                "quantizer": quantizer,
                "mode": mode,
                "engines": sorted({record.engine for record in group}),
                **_scores(group, options),
                "minus_exact": None if mode == "exact" else _difference(group, exact, options),
                "minus_raw": None if mode != "gated" else _difference(group, raw, options),
                "meter": _meter(group),
                "repairs": _repairs(group) if mode == "gated" else None,
                "ranking": ranking(group, exact, options) if mode == "raw" else None,
                "cells": [
                    {"task": task, "num_tokens": length, **_scores(part, options)}
                    for (task, length), part in _parts(group).items()
                ],
            }
        )
    return {"schema": SCHEMA, "about": dict(about), "bootstrap": {**options, "level": 0.95}, "rows": rows}


RANKING_SCORES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "log_a_max": lambda meter: number(meter["log_a_max"]),
    "uncertified_share": lambda meter: 1 - meter["tv_certified_cells"] / meter["cells_measured"],
    "damaged_share": lambda meter: meter["damaged_cells"] / meter["cells_measured"],
}
"""What a request's meter says in one number: the higher, the more likely its answer is lost."""


def ranking(
    group: Sequence[SampleRecord], exact: Mapping[Any, SampleRecord], options: Mapping[str, int]
) -> dict[str, Any] | None:
    """How well each ranking score tells lost answers from kept ones.

    lost: the exact cache scored more on that sample. None without the exact answers or without the meter.
    """
    pairs = [
        (record.meter, record.score < exact[record.sample].score)
        for record in group
        if record.sample in exact and record.meter is not None and record.meter["cells_measured"]
    ]
    if not pairs:
        return None
    lost = [was_lost for _, was_lost in pairs]
    found = {}
    for name, value in RANKING_SCORES.items():
        area = auroc_interval([value(meter) for meter, _ in pairs], lost, **options)
        auroc = None if area is None else area.as_dict()
        found[name] = {"lost": sum(lost), "count": len(lost), "auroc": auroc}
    return found


def _grouped(records: Iterable[SampleRecord]) -> dict[tuple[str, str], list[SampleRecord]]:
    """By quantizer and mode: exact first, then each quantizer raw before gated, in the order they came."""
    groups: defaultdict[tuple[str, str], list[SampleRecord]] = defaultdict(list)
    for record in records:
        groups[record.quantizer, record.mode].append(record)
    names = list(dict.fromkeys(quantizer for quantizer, _ in groups))

    def place(key: tuple[str, str]) -> tuple[bool, int, int]:
        return key[1] != "exact", names.index(key[0]), list(MODES).index(key[1])  # type: ignore[arg-type]

    return {key: groups[key] for key in sorted(groups, key=place)}


def _parts(group: Sequence[SampleRecord]) -> dict[tuple[str, int], list[SampleRecord]]:
    parts: defaultdict[tuple[str, int], list[SampleRecord]] = defaultdict(list)
    for record in group:
        parts[record.task, record.num_tokens].append(record)
    return dict(sorted(parts.items()))


def _by_sample(records: Iterable[SampleRecord]) -> dict[Any, SampleRecord]:
    return {record.sample: record for record in records}


def _scores(group: Sequence[SampleRecord], options: Mapping[str, int]) -> dict[str, Any]:
    scores = [record.score for record in group]
    return {"score": mean_interval(scores, **options).as_dict(), "zero_scores": sum(score == 0 for score in scores)}


def _difference(
    group: Sequence[SampleRecord], other: Mapping[Any, SampleRecord], options: Mapping[str, int]
) -> dict[str, float | int] | None:
    """Paired over the samples both were asked; None where there is none."""
    pairs = [(record.score, other[record.sample].score) for record in group if record.sample in other]
    if not pairs:
        return None
    return paired_difference([a for a, _ in pairs], [b for _, b in pairs], **options).as_dict()


def _meter(group: Sequence[SampleRecord]) -> dict[str, Any] | None:
    meters = [record.meter for record in group if record.meter is not None]
    if not meters:
        return None
    measured = sum(m["cells_measured"] for m in meters)
    any_query = sum(m["tv_certified_any_query"] for m in meters)
    worst = [m["worst"] for m in meters if m["worst"] is not None]
    return {
        "tau": meters[0]["tau"],
        "tier": meters[0]["tier"],
        "cells_measured": measured,
        "cells_exact": sum(m["cells_exact"] for m in meters),
        "cells_unknown": sum(m["cells_unknown"] for m in meters),
        "tv_certified_share": sum(m["tv_certified_cells"] for m in meters) / measured if measured else None,
        "tv_certified_any_query_share": any_query / measured if measured else None,
        "damaged_share": sum(m["damaged_cells"] for m in meters) / measured if measured else None,
        "worst": max(worst) if worst else None,
        "audited": sum(m["audited"] for m in meters),
        "violations": sum(m["violations"] for m in meters),
        "mismatches": sum(m["mismatches"] for m in meters),
    }


def _repairs(group: Sequence[SampleRecord]) -> dict[str, Any] | None:
    meters = [record.meter for record in group if record.meter is not None]
    if not meters:
        return None
    blocks = [m["repaired_blocks"] for m in meters]
    return {
        "blocks_median": statistics.median(blocks),
        "blocks_max": max(blocks),
        "bytes_total": sum(m["repaired_bytes"] for m in meters),
        "within_target": sum(m["gate_within_target"] for m in meters),
        "above_target": sum(m["gate_above_target"] for m in meters),
        "ranked": sum(m["gate_ranked"] for m in meters),
    }
