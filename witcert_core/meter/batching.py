"""Query rows of about one length laid side by side, so that one tensor operation serves them all.

A row reads Hkv heads of the cache; R rows side by side read R * Hkv heads of a cache whose token i is each row's own
i-th token. What a shorter row does not see is filled with its own first token and has to be masked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_ELEMENTS = 2**21
"""Tokens times query channels side by side at most: beyond that arithmetic takes the time, not operations."""
SPREAD = 1.25
"""The longest of the rows has at most this many times the tokens of the shortest."""


@dataclass(frozen=True)
class RowBatch:
    """R rows: their numbers, their slots [S, R] int64 and what they see of them, bool [S, R] (None: everything)."""

    rows: list[int]
    lengths: list[int]
    slots: Tensor
    seen: Tensor | None

    def heads(self, tokens: Tensor) -> Tensor:
        """``[S * R, Hkv, ...]``, of the slots in order, as ``[S, R * Hkv, ...]``."""
        return tokens.reshape(self.slots.shape[0], -1, *tokens.shape[2:])

    def unseen(self, heads: int) -> Tensor | None:
        """bool [R * heads, S], for `heads` cells a row; None if every row sees everything."""
        return None if self.seen is None else ~self.seen.T.repeat_interleave(heads, 0)

    def counts(self, flags: Tensor, heads: int) -> Tensor:
        """int64 [R, heads]: of the flags [S * R, Hkv], of the slots in order, those set that each query head sees."""
        kv_heads = flags.shape[1]
        by_row = flags.reshape(*self.slots.shape, kv_heads)
        if self.seen is not None:
            by_row = by_row & self.seen[..., None]
        return by_row.sum(0).repeat_interleave(heads // kv_heads, 1)

    def stacked(self, radii: Sequence[Tensor]) -> Tensor:
        """[R * H, S] of the rows' own radii [H, S_r], 0 where a row sees nothing."""
        if self.seen is None:
            return torch.cat(list(radii))
        heads = radii[0].shape[0]
        whole = torch.zeros(len(radii), heads, self.slots.shape[0], dtype=torch.float64, device=self.slots.device)
        for row, radius in zip(whole, radii, strict=True):
            row[:, : radius.shape[1]] = radius
        return whole.flatten(0, 1)


def batch_rows(slots: Sequence[Tensor], elements: int) -> Iterator[RowBatch]:
    """Rows with `slots[r]` [S_r] int64, at least one each, in batches, and a token counts as `elements`."""
    batch: list[int] = []
    for row in sorted(range(len(slots)), key=lambda r: slots[r].numel()):
        length = slots[row].numel()
        too_long = bool(batch) and length > SPREAD * slots[batch[0]].numel()
        if batch and (too_long or length * elements * (len(batch) + 1) > MAX_ELEMENTS):
            yield _joined(batch, slots)
            batch = []
        batch.append(row)
    if batch:
        yield _joined(batch, slots)


def _joined(rows: list[int], slots: Sequence[Tensor]) -> RowBatch:
    own = [slots[row] for row in rows]
    lengths = [s.numel() for s in own]
    if lengths[0] == lengths[-1]:
        return RowBatch(rows, lengths, torch.stack(own, 1), None)
    padded = torch.nn.utils.rnn.pad_sequence(own)
    seen = torch.arange(lengths[-1], device=padded.device)[:, None] < torch.tensor(lengths, device=padded.device)
    return RowBatch(rows, lengths, torch.where(seen, padded, padded[0]), seen)
