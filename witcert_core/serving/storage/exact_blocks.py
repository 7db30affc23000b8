"""Exact blocks beside a packed cache: what a gate restored is read from its exact copy, everything else from codes.

The copies are exact ones; a repair marks heads of slots to be read from there, so the packed pool keeps
its bytes and a repair writes nothing into it. A copy that the limit on copies drives out leaves the codes, and
their radius, in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from witcert_core.cache.exact_copies import ExactCopies
from witcert_core.meter.protocols import Radii
from witcert_core.serving.geometry import Geometry


class HeadRadii(Radii, Protocol):
    """The radii of a layer, or of one of its KV heads."""

    def head(self, kv_head: int) -> HeadRadii: ...


class Codes(Protocol):
    """A packed cache: what its codes stand for, and how far they may be off, by global layer id."""

    def __getitem__(self, layer: int) -> HeadRadii: ...

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """k [S, Hkv, D] and v [S, Hkv, Dv] float32 of `slots` [S]."""
        ...


@dataclass(frozen=True)
class _Own:
    """A chunk being computed, which reads its own exact tokens: k [N, Hkv, D], v [N, Hkv, Dv]; place [SLOTS], or -1."""

    place: Tensor
    k: Tensor
    v: Tensor


class RepairedCache:
    """A packed cache with exact heads of slots. Both the `Pool` a repairer writes to and the radii it asks.

    Shapes: SLOTS slots, S of them read, Hkv KV heads, D head_dim, Dv v_head_dim.
    """

    def __init__(self, cache: Codes, copies: ExactCopies, geometry: Geometry) -> None:
        self.cache = cache
        self.copies = copies
        self.num_slots = geometry.num_slots
        shape = geometry.num_slots, geometry.num_kv_heads
        self._restored = {
            layer: torch.zeros(shape, dtype=torch.bool, device=geometry.device) for layer in geometry.layers
        }
        self._own: _Own | None = None

    def __getitem__(self, layer: int) -> RepairedLayer:
        return RepairedLayer(self, layer, slice(None))

    def begin_pass(self, slots: Tensor) -> None:
        """New tokens are about to be written into `slots` [N]: their former repairs and copies are void."""
        for restored in self._restored.values():
            restored[slots] = False
        self.copies.claim(slots)

    def forget(self, slots: Tensor) -> None:
        """The engine put other tokens into `slots` [N], of which there are no copies."""
        for restored in self._restored.values():
            restored[slots] = False
        self.copies.drop(slots)

    @contextmanager
    def chunk(self, slots: Tensor, k: Tensor, v: Tensor) -> Iterator[None]:
        """Within the block `slots` [N] hold exact k and v: a chunk that attends itself before it is packed."""
        place = torch.full((self.num_slots,), -1, dtype=torch.int64, device=slots.device)
        place[slots] = torch.arange(slots.numel(), device=slots.device)
        self._own = _Own(place, k, v)
        try:
            yield
        finally:
            self._own = None

    def exact(self, layer: int, slots: Tensor) -> Tensor:
        """bool [S, Hkv]: which heads of `slots` are read exactly."""
        found = self._restored[layer][slots] & self.copies.has(slots)[:, None]
        return found if self._own is None else found | (self._own.place[slots] >= 0)[:, None]

    def mark(self, layer: int, slots: Tensor, heads: slice) -> None:
        """The `heads` of `slots` [N] are read from their exact copies from now on."""
        self._restored[layer][slots, heads] = True

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """k [S, Hkv, D] and v [S, Hkv, Dv] float32 as attention reads them."""
        k, v = self.cache.read(layer, slots)
        restored = self._restored[layer][slots] & self.copies.has(slots)[:, None]
        for head in restored.any(0).nonzero().flatten().tolist():
            mine = restored[:, head]
            exact_k, exact_v = self.copies.get(layer, slots[mine], head)
            k[mine, head], v[mine, head] = exact_k.to(k), exact_v.to(v)
        if self._own is not None:
            place = self._own.place[slots]
            mine = place >= 0
            k[mine], v[mine] = self._own.k[place[mine]].to(k), self._own.v[place[mine]].to(v)
        return k, v

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Part of `Pool`; a packed cache is written as codes, see `PackedKV.write`."""
        raise NotImplementedError("a packed cache is written as codes")

    def restore(self, layer: int, slots: Tensor, head: int, k: Tensor, v: Tensor) -> None:
        """From now on `slots` [N] of this head are read from their exact copies, which is what k and v are."""
        self.mark(layer, slots, slice(head, head + 1))


@dataclass(frozen=True)
class RepairedLayer:
    """`Radii` of one layer, all heads or one: 0 where a head is exact, else what its codes say.

    Exact tokens still count in the union over tokens under the dither law.
    """

    owner: RepairedCache
    layer: int
    heads: slice

    def head(self, kv_head: int) -> RepairedLayer:
        return RepairedLayer(self.owner, self.layer, slice(kv_head, kv_head + 1))

    def key_radius(self, q: Tensor, slots: Tensor, sm_scale: float, delta_loc: float) -> Tensor:
        """Part of `Radii`."""
        radius = self._codes().key_radius(q, slots, sm_scale, delta_loc)
        exact = self.exact_heads(slots)
        return radius.masked_fill(exact.T.repeat_interleave(len(q) // exact.shape[1], 0), 0.0)

    def value_radius(self, slots: Tensor) -> Tensor:
        """Part of `Radii`."""
        return self._codes().value_radius(slots).masked_fill(self.exact_heads(slots), 0.0)

    def residuals(self, slots: Tensor) -> tuple[Tensor, Tensor] | None:
        """Part of `Radii`: of codes, where the cache keeps sketches; 0 where a head is exact."""
        found = self._codes().residuals(slots)
        if found is None:
            return None
        exact = self.exact_heads(slots)[..., None]
        return found[0].masked_fill(exact, 0.0), found[1].masked_fill(exact, 0.0)

    def is_exact(self, slots: Tensor) -> Tensor:
        """bool [S]: whether every head here of `slots` [S] is exact."""
        return self.exact_heads(slots).all(1)

    def mark_exact(self, slots: Tensor) -> None:
        """Part of `SlotErrors`."""
        self.owner.mark(self.layer, slots, self.heads)

    def exact_heads(self, slots: Tensor) -> Tensor:
        """bool [S, Hkv]: heads that are read from their exact copies, or of the chunk that is being computed."""
        return self.owner.exact(self.layer, slots)[:, self.heads]

    def _codes(self) -> HeadRadii:
        layer = self.owner.cache[self.layer]
        return layer if self.heads == slice(None) else layer.head(self.heads.start)
