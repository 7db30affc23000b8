"""What the matching cells of a probe come to: counts, maxima, powers of two, the highest ones. All of bounded size."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from witcert_core.probes.language import Aggregate

MAX_GROUPS = 1024
"""Groups of an answer; cells of further ones are counted together, without their values."""
Cell = dict[str, Any]
"""Where a cell is: request, layer, head, step, position, form."""
Group = tuple[str | int | float, ...]


def power_of_two(value: float) -> str:
    """The bucket of a value: `0`, `inf`, or the largest power of two that is not above it."""
    if value <= 0:
        return "0"
    return "inf" if math.isinf(value) else f"2^{math.frexp(value)[1] - 1}"


@dataclass
class Summary:
    """The cells of one group."""

    cells: int = 0
    largest: float | None = None
    buckets: Counter[str] = field(default_factory=Counter)

    def add(self, values: Sequence[float], cells: int, in_buckets: bool) -> None:
        self.cells += cells
        if values:
            self.largest = max(*values, self.largest if self.largest is not None else -math.inf)
        if in_buckets:
            self.buckets.update(map(power_of_two, values))


class Answer:
    """The answer to one aggregate. A cell without the measure (exact, unknown) is counted and has no value."""

    def __init__(self, aggregate: Aggregate, by: Sequence[str]) -> None:
        self.aggregate, self.by = aggregate, tuple(by)
        self.groups: dict[Group, Summary] = {}
        self.left_out = 0
        self._highest: list[tuple[float, int, Cell]] = []
        self._seen = 0

    def add(self, group: Group, values: Sequence[float], cells: int) -> None:
        """Count `cells` cells of a group, of which those with a measure have `values`."""
        if group not in self.groups:
            if len(self.groups) >= MAX_GROUPS:
                self.left_out += cells
                return
            self.groups[group] = Summary()
        self.groups[group].add(values, cells, self.aggregate.kind == "quantize")

    def floor(self) -> float:
        """What a value must be above to be among the highest cells that are kept."""
        if self.aggregate.kind != "top" or self.by:
            return math.inf
        return self._highest[0][0] if len(self._highest) == self.aggregate.number else -math.inf

    def keep(self, value: float, cell: Cell) -> None:
        """Keep a cell as one of the highest; of equals the first."""
        self._seen += 1
        item = (value, -self._seen, cell)
        if len(self._highest) < self.aggregate.number:
            heapq.heappush(self._highest, item)
        else:
            heapq.heappushpop(self._highest, item)

    def as_dict(self) -> dict[str, Any]:
        """`groups`, those with the highest value or count first; `top` without `by`: the cells. Values are numbers or
        "inf"."""
        kind = self.aggregate.kind
        found: dict[str, Any] = {"groups_left_out_cells": self.left_out}
        if kind == "top" and not self.by:
            highest = sorted(self._highest, key=lambda item: item[:2], reverse=True)
            return {**found, "top": [{"value": _number(value), **cell} for value, _, cell in highest]}
        rows = []
        for group, summary in self.groups.items():
            row: dict[str, Any] = {"by": dict(zip(self.by, group, strict=True)), "cells": summary.cells}
            if kind == "quantize":
                row["buckets"] = {bucket: summary.buckets[bucket] for bucket in sorted(summary.buckets, key=_exponent)}
            elif kind != "count":
                row["max"] = None if summary.largest is None else _number(summary.largest)
            rows.append((summary, row))

        def rank(item: tuple[Summary, dict[str, Any]]) -> tuple[float, int]:
            largest = item[0].largest
            return (-math.inf if largest is None or kind in ("count", "quantize") else largest, item[0].cells)

        rows.sort(key=rank, reverse=True)
        shown = [row for _, row in rows]
        return {**found, "groups": shown[: self.aggregate.number] if kind == "top" else shown}


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else "inf" if value > 0 else "-inf"


def _exponent(bucket: str) -> float:
    return {"0": -math.inf, "inf": math.inf}.get(bucket) or float(bucket[2:])
