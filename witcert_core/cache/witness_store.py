"""Side tensors of one rank: what the meter must remember about every slot of the cache, layer by layer.

Shapes: SLOTS slots of the engine's pool, N slots written, Hkv local KV heads, D head_dim, Dv v_head_dim.

Every slot starts *unknown* (radius infinity, meter 1) and becomes so again whenever a write cannot be accounted for.
A write replaces whatever the slot said before, so a reused slot never keeps the radius of its former token. Small
writes wait until somebody asks (`write_queue.py`); every way to the side tensors of a layer leads through `_settled`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from witcert_core.cache.bands import BandMap
from witcert_core.cache.layer_witness import EXACT_CODE, DitherSlots, LayerWitness, SketchSlots, WitnessSlots
from witcert_core.cache.norm_codes import UNKNOWN_CODE
from witcert_core.cache.outliers import SIXTEEN_BIT
from witcert_core.cache.write_queue import Write, WriteQueue, joined
from witcert_core.quantizers.base import Encoded, Quantizer

Recorder = Callable[[LayerWitness, Write], None]


class WitnessStore:
    """The side tensors of all metered layers of one rank.

    recorder: what keeps the norms of a write in the place of torch, at once; for a store of `WitnessSlots`.
    layers: global layer ids. storage_dtype: the dtype of the engine's pool. sketch_bits: 0, or bits a channel of the
    residuals' sketches. With `keep_exact` the exact K and V of every slot are kept as well (SLOTS * Hkv * (D + Dv)
    elements a layer), which is what an audit compares against.
    """

    def __init__(
        self,
        *,
        quantizer: Quantizer,
        layers: Sequence[int],
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        bands: BandMap,
        storage_dtype: torch.dtype,
        keep_exact: bool = False,
        sketch_bits: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        self.bands = bands
        self.storage_dtype = storage_dtype
        # With sketches a dithered quantizer is one like any other: what is kept is the error it made, not its law.
        self.dithered = quantizer.tier == "probabilistic" and not sketch_bits

        def tensor(*tail: int, value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((num_slots, num_kv_heads, *tail), value, dtype=dtype, device=device)

        def slots() -> LayerWitness:
            if sketch_bits:
                return SketchSlots.unknown_of(tensor, bands, v_head_dim, sketch_bits)
            if not self.dithered:
                return WitnessSlots.unknown(tensor, bands)
            # In a 32-bit pool the dither term's own slack covers the rounding of s * (code - u); see `radii.py`.
            rounds = storage_dtype in SIXTEEN_BIT
            return DitherSlots.unknown(tensor, bands, stored_witness=quantizer.stored_witness, rounds_storage=rounds)

        self._layers = {layer: slots() for layer in layers}
        self._waiting = {layer: WriteQueue() for layer in layers}
        self.recorder: Recorder | None = None
        shape = (num_slots, num_kv_heads)
        self.exact_k: dict[int, Tensor] = {}
        self.exact_v: dict[int, Tensor] = {}
        if keep_exact:
            for layer in layers:
                self.exact_k[layer] = torch.zeros(*shape, head_dim, dtype=storage_dtype, device=device)
                self.exact_v[layer] = torch.zeros(*shape, v_head_dim, dtype=storage_dtype, device=device)

    def __getitem__(self, layer: int) -> LayerWitness:
        return self._settled(layer)

    def __contains__(self, layer: int) -> bool:
        return layer in self._layers

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._layers)

    @property
    def nbytes(self) -> int:
        """Bytes of the side tensors, without the exact copies."""
        return sum(t.nbytes for slots in self._layers.values() for t in slots.tensors())

    @property
    def exact_nbytes(self) -> int:
        """Bytes of the exact copies kept for audits."""
        return sum(t.nbytes for kept in (self.exact_k, self.exact_v) for t in kept.values())

    def write(
        self,
        layer: int,
        slots: Tensor,
        *,
        exact_k: Tensor,
        exact_v: Tensor,
        stored_k: Tensor,
        stored_v: Tensor,
        encoded_k: Encoded | None = None,
        encoded_v: Encoded | None = None,
    ) -> None:
        """Account for N tokens just written into `slots` [N].

        exact_k, stored_k [N, Hkv, D], exact_v, stored_v [N, Hkv, Dv]: what the run handed over, in the pool's dtype,
        and what the pool gives back, in copies that nobody writes to any more. encoded_k, encoded_v: the codes and
        scales of a dithered quantizer; without them a dithered layer counts as unquantized and only an exact write is
        accepted.
        """
        with self._void_if_it_fails([layer], slots):
            self.keep(layer, slots, exact_k, exact_v)
            write = Write(slots, exact_k, exact_v, stored_k, stored_v, encoded_k, encoded_v)
            if self.recorder is not None:
                self.recorder(self._layers[layer], write)
            elif not self._waiting[layer].add(write):
                self._account(self._settled(layer), write)

    def _settled(self, layer: int) -> LayerWitness:
        """The side tensors of a layer with every write accounted for."""
        side, waited = self._layers[layer], self._waiting[layer].take()
        accounted, done = 0, not waited
        try:
            for write in joined(waited):
                self._account(side, write)
                accounted += 1
            done = True
        finally:
            if not done:  # the slots were written all the same: what they said before is void
                for write in waited[accounted:]:
                    side.fill(write.slots, UNKNOWN_CODE)
        return side

    @contextmanager
    def _void_if_it_fails(self, layers: Iterable[int], slots: Tensor) -> Iterator[None]:
        """Whatever raises within, `slots` [N] have changed: they become unknown, as do writes that wait."""
        done = False
        try:
            yield
            done = True
        finally:
            if not done:
                for layer in layers:
                    for write in self._waiting[layer].take():
                        self._layers[layer].fill(write.slots, UNKNOWN_CODE)
                    self._layers[layer].fill(slots, UNKNOWN_CODE)

    def _account(self, side: LayerWitness, write: Write) -> None:
        for piece in write.split():
            side.remember(piece)

    def keep(self, layer: int, slots: Tensor, exact_k: Tensor, exact_v: Tensor) -> None:
        """Keep exact K [N, Hkv, D] and V [N, Hkv, Dv] of `slots` [N] for audits, if this store keeps any."""
        if layer in self.exact_k:
            self.exact_k[layer][slots] = exact_k.to(self.storage_dtype)
            self.exact_v[layer][slots] = exact_v.to(self.storage_dtype)

    def move(self, target: Tensor, source: Tensor) -> None:
        """The engine copied slots of its pool, all layers: `source` [N] onto `target` [N]; what is known goes along."""
        with self._void_if_it_fails(self._layers, target):
            for layer in self._layers:
                for tensor in self._settled(layer).tensors():
                    tensor[target] = tensor[source]
        for kept in (*self.exact_k.values(), *self.exact_v.values()):
            kept[target] = kept[source]

    def mark_exact(self, layer: int, slots: Tensor) -> None:
        """The pool holds exactly what the run handed over in `slots` [N] (radius 0)."""
        with self._void_if_it_fails([layer], slots):
            self._settled(layer).fill(slots, EXACT_CODE)

    def mark_unknown(self, layer: int, slots: Tensor) -> None:
        """Nothing is known about `slots` [N] any more (radius infinity)."""
        with self._void_if_it_fails([layer], slots):
            self._settled(layer).fill(slots, UNKNOWN_CODE)
