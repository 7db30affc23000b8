"""Exact copies of keys and values, by slot, in host memory: what a repair writes back.

Shapes: SLOTS slots of the engine's pool, ROWS copies kept, Hkv local KV heads, D head_dim, Dv v_head_dim.

A copy belongs to the token last written into its slot. When the memory is full the copies used longest ago go first;
their blocks are then *unrepairable*, which is reported as such and never as fine. A copy is used when a request that
reads its slot is gated, whatever is repaired: which copies go must not depend on what some layer found (tier D).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from witcert_core.errors import InputError

NO_ROW = -1


class ShadowStore:
    """Copies of up to `num_rows` slots for every layer; all layers of a slot come and go together.

    num_rows: as many as the caller's memory limit allows; with at least `num_slots` nothing is ever lost.
    pinned: page-locked memory, so that a GPU can fetch it without a copy in between.
    """

    def __init__(
        self,
        *,
        layers: Sequence[int],
        num_slots: int,
        num_rows: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        pinned: bool = False,
    ) -> None:
        if num_rows < 1:
            raise InputError(f"the shadow store has room for {num_rows} slots; give it memory for at least one")
        rows = min(num_rows, num_slots)

        def copies(width: int) -> Tensor:
            return torch.empty(rows, num_kv_heads, width, dtype=dtype, pin_memory=pinned)

        self._k = {layer: copies(head_dim) for layer in layers}
        self._v = {layer: copies(v_head_dim) for layer in layers}
        self._row_of = torch.full((num_slots,), NO_ROW, dtype=torch.int64)
        self._slot_of = torch.full((rows,), NO_ROW, dtype=torch.int64)
        self._used = torch.zeros(rows, dtype=torch.int64)
        self._clock = 0

    @property
    def num_rows(self) -> int:
        return int(self._slot_of.numel())

    @property
    def num_kv_heads(self) -> int:
        return int(next(iter(self._k.values())).shape[1])

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for kept in (self._k, self._v) for t in kept.values())

    @property
    def bytes_per_token_head(self) -> int:
        """K and V of one slot, layer and KV head: what paging it in moves."""
        k, v = (next(iter(kept.values())) for kept in (self._k, self._v))
        return (k.shape[-1] + v.shape[-1]) * k.element_size()

    @property
    def room(self) -> int:
        """Rows that are free or were not used since the clock last advanced."""
        return int((self._used < self._clock).sum())

    def advance(self) -> None:
        """What is used from here on was used later than all before."""
        self._clock += 1

    def claim(self, slots: Tensor, *, advance: bool = True) -> None:
        """Make room for the tokens about to be written into `slots` [N]; their former copies are void.

        Of more slots than there are rows only the last ones are kept.
        """
        slots = _on_host(slots)
        if advance:
            self.advance()
        self._release(slots)
        wanted = slots[-self.num_rows :]
        # Free rows carry the oldest stamp of all, so they are taken before anything is evicted.
        rows = torch.argsort(self._used, stable=True)[: wanted.numel()]
        evicted = self._slot_of[rows]
        self._row_of[evicted[evicted != NO_ROW]] = NO_ROW
        self._slot_of[rows] = wanted
        self._row_of[wanted] = rows
        self._used[rows] = self._clock

    def put(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Copy k [N, Hkv, D] and v [N, Hkv, Dv] of the claimed `slots` [N]; slots without a row are left out."""
        rows = self._row_of[_on_host(slots)]
        kept = rows != NO_ROW
        self._k[layer][rows[kept]] = k[kept].to(self._k[layer])
        self._v[layer][rows[kept]] = v[kept].to(self._v[layer])

    def has(self, slots: Tensor) -> Tensor:
        """bool [N], where `slots` are: whether the exact copy of each is here."""
        return (self._row_of[_on_host(slots)] != NO_ROW).to(slots.device)

    def get(self, layer: int, slots: Tensor, kv_head: int | slice) -> tuple[Tensor, Tensor]:
        """k [N, D] and v [N, Dv] of one KV head, or [N, Hkv, D] and [N, Hkv, Dv] of several.

        InputError where a copy is gone (ask `has` first).
        """
        rows = self._row_of[_on_host(slots)]
        if bool((rows == NO_ROW).any()):
            raise InputError(f"layer {layer}: the copy of slot {int(slots[rows == NO_ROW][0])} is gone")
        return self._k[layer][rows, kv_head], self._v[layer][rows, kv_head]

    def drop(self, slots: Tensor) -> None:
        """Forget the copies of `slots`: something else is in them now."""
        self._release(_on_host(slots))

    def touch(self, slots: Tensor) -> None:
        """Count the copies of `slots` as used now: a request being served reads them."""
        rows = self._row_of[_on_host(slots)]
        self._used[rows[rows != NO_ROW]] = self._clock

    def _release(self, slots: Tensor) -> None:
        rows = self._row_of[slots]
        rows = rows[rows != NO_ROW]
        self._slot_of[rows] = NO_ROW
        self._used[rows] = 0
        self._row_of[slots] = NO_ROW


def _on_host(slots: Tensor) -> Tensor:
    """The copies and their index lie there, wherever the pool does."""
    return slots.to("cpu", torch.int64)
