"""What compression really did to a cell, where the exact keys and values of every token it sees are at hand.

Shapes: A rows, S tokens a row sees, H query heads, Hkv KV heads, D head_dim, Dv v_head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.sums import weighted_values
from witcert_core.meter.tv import softmax_with_sink, total_variation


@dataclass(frozen=True)
class Truth:
    """Of some rows of a layer, by their numbers in the pass: float64 [A, H] on the host, never a bound.

    tv: total variation between exact and compressed weights. out: ``||o - o~||`` of their outputs. NaN where
    something the row sees is no number.
    """

    rows: list[int]
    tv: Tensor
    out: Tensor

    @classmethod
    def of_rows(cls, rows: list[int], found: Sequence[tuple[Tensor, Tensor]]) -> Truth:
        """rows [A] numbers; found: their (tv [H], out [H])."""
        tv, out = zip(*found, strict=True)
        return cls(rows, torch.stack(tv).cpu(), torch.stack(out).cpu())

    @classmethod
    def of_parts(cls, parts: Sequence[Truth]) -> Truth:
        """Several of one layer, one after the other."""
        numbers = [row for part in parts for row in part.rows]
        return cls(numbers, torch.cat([part.tv for part in parts]), torch.cat([part.out for part in parts]))

    @classmethod
    def of_heads(cls, parts: Sequence[Truth]) -> Truth:
        """The same rows with the heads of several ranks side by side."""
        return cls(parts[0].rows, torch.cat([part.tv for part in parts], 1), torch.cat([part.out for part in parts], 1))

    def of(self, row: int) -> tuple[Tensor, Tensor] | None:
        """(tv [H], out [H]) of one row; None if it was not compared."""
        return (self.tv[self.rows.index(row)], self.out[self.rows.index(row)]) if row in self.rows else None


@dataclass(frozen=True)
class SketchedBounds:
    """Of some rows of a layer, by their numbers in the pass: bounds on TV from residual sketches, float64 [A, H]."""

    rows: list[int]
    tv: Tensor

    @classmethod
    def of_parts(cls, parts: Sequence[SketchedBounds]) -> SketchedBounds:
        """Several of one layer, one after the other."""
        return cls([row for part in parts for row in part.rows], torch.cat([part.tv for part in parts]))

    @classmethod
    def of_heads(cls, parts: Sequence[SketchedBounds]) -> SketchedBounds:
        """The same rows with the heads of several ranks side by side."""
        return cls(parts[0].rows, torch.cat([part.tv for part in parts], 1))

    def of(self, row: int) -> Tensor | None:
        """[H], of one row; None if it has none."""
        return self.tv[self.rows.index(row)] if row in self.rows else None


def compare(
    q: Tensor, stored_k: Tensor, stored_v: Tensor, exact_k: Tensor, exact_v: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """True TV [H] and output error ``||o - o~||`` [H], float64, of one row q [H, D].

    stored_k, exact_k [S, Hkv, D], stored_v, exact_v [S, Hkv, Dv]. Exact attention is in float64; compressed weights in
    float32, as an engine takes them, their sum over stored values in float64. Weights in float32 may sum to a little
    more than 1, and disjoint ones then be further apart than distributions are.
    """
    exact = spec.logits(q.to(torch.float64), exact_k.to(torch.float64))
    single = spec.logits(q.to(torch.float32), stored_k.to(torch.float32))
    p, served = (softmax_with_sink(logits, spec.sinks) for logits in (exact, single))
    seen = len(exact_k)
    outputs = [
        weighted_values(weights[:, :seen].to(torch.float64), v.to(torch.float64))
        for weights, v in ((p, exact_v), (served, stored_v))
    ]
    return total_variation(p, served).clamp(max=1.0), (outputs[0] - outputs[1]).norm(dim=-1)
