"""Exact copies of keys and values, by slot, in host memory: what a repair writes back.

Shapes: SLOTS slots of the engine's pool, COPIES of them kept, Hkv local KV heads, D head_dim, Dv v_head_dim.

A copy belongs to the token last written into its slot. When the memory is full the copies used longest ago go first;
their blocks are then *unrepairable*, which is reported as such and never as fine. A copy is used when a request that
reads its slot is gated, whatever is repaired: which copies go must not depend on what some layer found
(for the probabilistic tier).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from witcert_core.cache.copy_index import NO_COPY, CopyIndex
from witcert_core.errors import InputError


class ExactCopies(CopyIndex):
    """Copies of up to `num_copies` slots for every layer; all layers of a slot come and go together.

    num_copies: as many as the caller's memory limit allows; with at least `num_slots` nothing is ever lost.
    pinned: page-locked memory, so that a GPU can fetch it without a copy in between.
    """

    def __init__(
        self,
        *,
        layers: Sequence[int],
        num_slots: int,
        num_copies: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        pinned: bool = False,
    ) -> None:
        if num_copies < 1:
            raise InputError(
                f"there is room for the exact copies of {num_copies} slots; give it memory for at least one"
            )
        super().__init__(num_slots, num_copies)
        count = self.num_copies

        def copies(width: int) -> Tensor:
            return torch.empty(count, num_kv_heads, width, dtype=dtype, pin_memory=pinned)

        self._k = {layer: copies(head_dim) for layer in layers}
        self._v = {layer: copies(v_head_dim) for layer in layers}

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

    def put(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Copy k [N, Hkv, D] and v [N, Hkv, Dv] of the claimed `slots` [N]; slots without one are left out."""
        found = self.find(slots)
        kept = found != NO_COPY
        self._k[layer][found[kept]] = k[kept].to(self._k[layer])
        self._v[layer][found[kept]] = v[kept].to(self._v[layer])

    def get(self, layer: int, slots: Tensor, kv_head: int | slice) -> tuple[Tensor, Tensor]:
        """k [N, D] and v [N, Dv] of one KV head, or [N, Hkv, D] and [N, Hkv, Dv] of several.

        InputError where a copy is gone (ask `has` first).
        """
        found = self.find(slots)
        if bool((found == NO_COPY).any()):
            raise InputError(f"layer {layer}: the copy of slot {int(slots[found == NO_COPY][0])} is gone")
        return self._k[layer][found, kv_head], self._v[layer][found, kv_head]
