"""Causal attention over a cache that is decoded tile by tile: no more of it than a tile is in memory at a time.

Shapes: N new tokens of a request, S tokens it sees, T of them in a tile, H = G * Hkv query heads, D head_dim,
Dv v_head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

TILE = 1024
"""Tokens that are decoded at a time."""
ROWS = 256
"""Rows whose weights over a tile are in memory at a time."""

ReadTile = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Slots [T] -> keys [T, Hkv, D] and values [T, Hkv, Dv] float32."""


def attend_tiles(
    q: Tensor, requests: Sequence[Tensor], new: Sequence[int], read: ReadTile, sm_scale: float, out: Tensor
) -> None:
    """Attention of the new[i] last tokens of each request in float32, into out [TOKENS, H, Dv].

    q [TOKENS, H, D]; requests: slots [S] of the tokens of each, in order of position.
    """
    start = 0
    for slots, count in zip(requests, new, strict=True):
        rows = slice(start, start + count)
        out[rows] = _attend(q[rows].float(), slots, read, sm_scale, out.shape[-1]).to(out.dtype)
        start += count


def _attend(q: Tensor, slots: Tensor, read: ReadTile, sm_scale: float, value_width: int) -> Tensor:
    """[N, H, Dv] of one request: weights are scaled anew as a tile has a larger logit than those before it."""
    count, num_heads, _ = q.shape
    earlier = slots.numel() - count  # row r sees the tokens up to earlier + r
    sums = _Sums(count, num_heads, value_width, q.device)
    for first in range(0, slots.numel(), TILE):
        k, v = read(slots[first : first + TILE])
        width = len(k)
        # A mask does not keep what is no number from rows that do not see it: those are then taken one by one.
        masked = first + width - 1 > earlier
        one_by_one = masked and not bool(k.isfinite().all() & v.isfinite().all())
        for rows in _blocks(max(0, first - earlier), count, 1 if one_by_one else ROWS):
            end = min(width, earlier + rows.stop - first)
            seen = None
            if earlier + rows.start - first < end - 1:
                places = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + (earlier - first)
                seen = torch.arange(end, device=q.device) <= places
            sums.add(rows, q[rows], k[:end], v[:end], seen, sm_scale)
    return sums.output()


def _blocks(first: int, end: int, size: int) -> Iterator[slice]:
    return (slice(i, min(i + size, end)) for i in range(first, end, size))


class _Sums:
    """Per row and head: the largest logit so far, the sum of the weights and the weighted values."""

    def __init__(self, count: int, num_heads: int, width: int, device: torch.device) -> None:
        self.top = torch.full((num_heads, count, 1), float("-inf"), device=device)
        self.total = torch.zeros(num_heads, count, 1, device=device)
        self.values = torch.zeros(num_heads, count, width, device=device)

    def add(self, rows: slice, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, sm_scale: float) -> None:
        """q [R, H, D] over the tokens k [T, Hkv, D], v [T, Hkv, Dv]; seen [R, T]: at least one a row."""
        num_heads, num_rows = q.shape[1], len(q)
        shape = k.shape[1], -1, q.shape[2]  # the query heads of a KV head are rows of one product
        logits = q.transpose(0, 1).reshape(shape) @ k.permute(1, 2, 0) * sm_scale
        logits = logits.view(num_heads, num_rows, -1)
        if seen is not None:
            logits = logits.masked_fill(~seen, float("-inf"))
        top = torch.maximum(self.top[:, rows], logits.amax(-1, keepdim=True))
        weights, factor = (logits - top).exp_(), (self.top[:, rows] - top).exp_()
        made = weights.view(k.shape[1], -1, len(k)) @ v.transpose(0, 1)
        made = made.view(num_heads, num_rows, -1)
        self.top[:, rows] = top
        self.total[:, rows] = self.total[:, rows] * factor + weights.sum(-1, keepdim=True)
        self.values[:, rows] = self.values[:, rows] * factor + made

    def output(self) -> Tensor:
        """[N, H, Dv]."""
        return (self.values / self.total).transpose(0, 1)
