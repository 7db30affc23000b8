"""Tensor parallelism: every rank meters its own heads, rank 0 reports them all.

All ranks run the same passes over the same requests, so their row plans are equal; only heads differ. What must be
equal besides (the dither key) is sent from rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from witcert_core.meter.cells import CellBatch
from witcert_core.meter.truth import SketchedBounds, Truth
from witcert_core.serving.steps import StepCells, Verdict

T = TypeVar("T")
PER_ROW = ("num_visible", "delta_loc")  # equal on all ranks; every other field has heads in its second dimension


class Ranks:
    """The attention tensor-parallel group of this process. `group` is None for a single rank."""

    def __init__(self, rank: int, size: int, group: Any | None, root: int) -> None:
        self.rank = rank
        self.size = size
        self._group = group
        self._root = root

    @property
    def reports(self) -> bool:
        return self.rank == 0

    def from_root(self, value: T) -> T:
        """Rank 0's value on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self._root, group=self._group)
        return box[0]

    def collect(self, step: StepCells) -> StepCells | None:
        """The step with the heads of all ranks, on rank 0; None elsewhere."""
        if self.size == 1 or not step.rows:
            return step if self.reports else None
        parts: list[Any] | None = [None] * self.size if self.reports else None
        mine = (step.layers, step.deterministic_layers, step.verdicts, step.lost, step.truths, step.sketched)
        dist.gather_object(mine, parts, dst=self._root, group=self._group)
        if parts is None:
            return None
        layers, deterministic_layers, verdicts, lost, truths, sketched = zip(*parts, strict=True)
        return replace(
            step,
            layers=all_heads(layers),
            deterministic_layers=all_heads(deterministic_layers),
            verdicts=[Verdict.joined(same) for same in zip(*verdicts, strict=True)],
            lost=dict(item for part in lost for item in part.items()),
            truths={
                layer: Truth.of_heads([part[layer] for part in truths])
                for layer in truths[0]
                if all(layer in part for part in truths)
            },
            sketched={
                layer: SketchedBounds.of_heads([part[layer] for part in sketched])
                for layer in sketched[0]
                if all(layer in part for part in sketched)
            },
        )


def all_heads(parts: Sequence[dict[int, CellBatch]]) -> dict[int, CellBatch]:
    """The same rows with the heads of all ranks side by side, in every layer that all of them measured."""
    common = [layer for layer in parts[0] if all(layer in part for part in parts)]
    return {layer: batch_rows([part[layer] for part in parts]) for layer in common}


def batch_rows(batches: Sequence[CellBatch]) -> CellBatch:
    first = batches[0]
    joined = {}
    for field in fields(CellBatch):
        values = [getattr(batch, field.name) for batch in batches]
        joined[field.name] = values[0] if field.name in PER_ROW or values[0] is None else torch.cat(values, 1)
    return replace(first, **joined)
