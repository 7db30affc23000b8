"""What is known of some rows of a layer beside the bounds of all: the truth of a sample, bounds from its sketches.

Shapes: A rows, H query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor

Some = TypeVar("Some", bound="SomeRows")


@dataclass(frozen=True)
class SomeRows:
    """Numbers of some rows in the pass; each further field is float64 ``[A, H]`` on the host, of these rows."""

    rows: list[int]

    @classmethod
    def of_parts(cls: type[Some], parts: Sequence[Some]) -> Some:
        """Several of one layer, one after the other."""
        numbers = [row for part in parts for row in part.rows]
        return cls(numbers, *_joined(parts, 0))

    @classmethod
    def of_heads(cls: type[Some], parts: Sequence[Some]) -> Some:
        """The same rows with the heads of several ranks side by side."""
        return cls(parts[0].rows, *_joined(parts, 1))

    def of(self, row: int) -> tuple[Tensor, ...] | None:
        """Every field ``[H]`` of one row; None if nothing is known of it."""
        if row not in self.rows:
            return None
        return tuple(getattr(self, f.name)[self.rows.index(row)] for f in fields(self)[1:])


@dataclass(frozen=True)
class Truth(SomeRows):
    """What compression really did, never a bound; NaN where something the row sees is no number.

    tv: total variation between exact and compressed weights. out: ``||o - o~||`` of their outputs.
    """

    tv: Tensor
    out: Tensor


@dataclass(frozen=True)
class SketchedBounds(SomeRows):
    """Bounds on TV from residual sketches."""

    tv: Tensor


def _joined(parts: Sequence[SomeRows], dim: int) -> list[Tensor]:
    return [torch.cat([getattr(part, f.name) for part in parts], dim) for f in fields(parts[0])[1:]]
