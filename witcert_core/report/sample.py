"""What compression really did to the cells of audited requests, beside their bounds: distributions from counts.

Shapes: H query heads, A of their cells.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from witcert_core.report.records import json_number

if TYPE_CHECKING:
    from witcert_core.meter.cells import CellBatch

PER_OCTAVE, LEAST, MOST = 8, -40, 24
"""Buckets of a distribution: eighths of a factor of 2, from 2^-40 to 2^24."""
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
NO_DAMAGE = 1e-9
"""A true value below this is rounding: what a bound is relative to it says nothing."""


@dataclass
class Distribution:
    """Non-negative numbers by size. Quantiles are the upper ends of their buckets, so at most 9.1 % too large."""

    count: int = 0
    total: float = 0.0
    largest: float = 0.0
    _buckets: Counter[int] = field(default_factory=Counter)

    def add(self, values: Tensor) -> None:
        """Count values [A] float64; infinite ones are larger than all others, NaN is not allowed."""
        if not values.numel():
            return
        self.count += values.numel()
        self.total += float(values.sum())
        self.largest = max(self.largest, float(values.max()))
        place = torch.ceil(torch.log2(values.clamp(2.0**LEAST, 2.0 ** (MOST + 1))) * PER_OCTAVE)
        self._buckets.update(int(x) for x in place.tolist())

    def quantile(self, share: float) -> float:
        """At least `share` of the values are at most this."""
        wanted, seen = math.ceil(share * self.count), 0
        for place in sorted(self._buckets):
            seen += self._buckets[place]
            if seen >= wanted and place <= MOST * PER_OCTAVE:
                return min(math.exp2(place / PER_OCTAVE), self.largest)
        return self.largest

    def as_dict(self) -> dict[str, Any] | None:
        if not self.count:
            return None
        found = {name: json_number(self.quantile(share)) for name, share in QUANTILES.items()}
        return {**found, "max": json_number(self.largest), "mean": json_number(self.total / self.count)}


@dataclass(frozen=True)
class Compared:
    """The cells of one row that were compared and read something quantized: true TV and output error relative to the
    output, bounds over both.

    [A] float64 each; of the last two those with a true value above `NO_DAMAGE` only. violations: exact cells too.
    """

    tv: Tensor
    out: Tensor
    tv_ratio: Tensor
    out_ratio: Tensor
    violations: int

    @classmethod
    def of(cls, cells: CellBatch, row: int, tv: Tensor, out: Tensor) -> Compared:
        """Row `row` of a measured batch; tv and out [H] float64: the truth, NaN where there is none."""
        known = ~(tv.isnan() | out.isnan())
        meter, floor, out_bound, out_norm = (
            x[row].to("cpu", torch.float64)[known] for x in (cells.meter, cells.floor, cells.out_bound, cells.out_norm)
        )
        tv, out, read = tv[known], out[known], cells.num_quantized[row].cpu()[known] > 0
        violations = int((~((floor <= tv) & (tv <= meter) & (out <= out_bound))).sum())
        meter, out_bound, out_norm, tv, out = (x[read] for x in (meter, out_bound, out_norm, tv, out))
        relative = torch.where(out == 0, 0.0, out / out_norm)
        of_tv, of_out = (meter / tv)[tv > NO_DAMAGE], (out_bound / out)[relative > NO_DAMAGE]
        return cls(tv, relative, of_tv, of_out, violations)


@dataclass(frozen=True)
class BoundedBySketches:
    """The cells of one row that were bounded by sketches and read something quantized: [A] float64 each.

    tv: those bounds. of_meter: each as a share of the ordinary bound. ratio: each over a true value above `NO_DAMAGE`.
    violations: true values above them, exact cells too.
    """

    tv: Tensor
    of_meter: Tensor
    ratio: Tensor
    violations: int

    @classmethod
    def of(cls, cells: CellBatch, row: int, bound: Tensor, true: Tensor | None) -> BoundedBySketches:
        """Row `row` of a measured batch; bound [H] float64: from sketches; true [H]: TV where known, NaN where not."""
        bound, meter = bound.to("cpu", torch.float64), cells.meter[row].to("cpu", torch.float64)
        true = torch.full_like(bound, math.nan) if true is None else true
        read = cells.num_quantized[row].cpu() > 0
        share = torch.where(bound == 0, 0.0, bound / meter)  # an ordinary bound of 0 is of a cell that reads exactly
        known = read & (true > NO_DAMAGE)
        return cls(bound[read], share[read], (bound / true)[known], int((true > bound).sum()))


@dataclass
class SketchCounts:
    """One request of the sample of `meter.sketch_share`."""

    cells: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    tv: Distribution = field(default_factory=Distribution)
    of_meter: Distribution = field(default_factory=Distribution)
    ratio: Distribution = field(default_factory=Distribution)

    def add(self, found: BoundedBySketches) -> None:
        self.cells += found.tv.numel()
        for name in ("tv", "of_meter", "ratio"):
            getattr(self, name).add(getattr(found, name))

    def as_dict(self) -> dict[str, Any] | None:
        """None for a request that was not drawn."""
        if not self.cells and not self.missed:
            return None
        return {
            "cells": self.cells,
            "rows_not_sketched": dict(self.missed),
            "tv_bound": self.tv.as_dict(),
            "share_of_bound": self.of_meter.as_dict(),
            "bound_over_tv": self.ratio.as_dict(),
        }


@dataclass
class SampleCounts:
    """One request of the samples."""

    cells: int = 0
    violations: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    tv: Distribution = field(default_factory=Distribution)
    out: Distribution = field(default_factory=Distribution)
    tv_ratio: Distribution = field(default_factory=Distribution)
    out_ratio: Distribution = field(default_factory=Distribution)
    sketches: SketchCounts = field(default_factory=SketchCounts)

    def add(self, found: Compared) -> None:
        self.cells += found.tv.numel()
        self.violations += found.violations
        for name in ("tv", "out", "tv_ratio", "out_ratio"):
            getattr(self, name).add(getattr(found, name))

    def add_sketched(self, found: BoundedBySketches) -> None:
        self.sketches.add(found)
        self.violations += found.violations

    def as_dict(self) -> dict[str, Any] | None:
        """None for a request that no sample drew."""
        sketched = self.sketches.as_dict()
        if not self.cells and not self.missed and sketched is None:
            return None
        return {
            "cells": self.cells,
            "violations": self.violations,
            "rows_not_audited": dict(self.missed),
            "tv": self.tv.as_dict(),
            "out_rel": self.out.as_dict(),
            "bound_over_tv": self.tv_ratio.as_dict(),
            "bound_over_out": self.out_ratio.as_dict(),
            "sketched": sketched,
        }
