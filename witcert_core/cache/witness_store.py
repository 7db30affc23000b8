"""Side tensors of one rank: what the meter must remember about every slot of the cache, and the radii read from them.

Shapes: SLOTS slots of the engine's pool, N slots written, S slots read, Hkv local KV heads, H = G * Hkv query heads,
D head_dim, Dv v_head_dim, B bands, Gr = ceil(D / 32) groups.

Every slot starts *unknown* (radius infinity, meter 1) and becomes so again whenever a write cannot be accounted for.
A write replaces whatever the slot said before, so a reused slot never keeps the radius of its former token. Small
writes wait until somebody asks (`waiting.py`); every way to the side tensors of a layer leads through `_settled`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from witcert_core.cache.bands import BandMap
from witcert_core.cache.norm_codes import decode_norm, encode_norm_up, value_codes, witness_codes
from witcert_core.cache.packed import checked_scales, half_step_radius
from witcert_core.cache.radii import DitherLaw, dither_law, radius_dither, radius_group_witness, radius_witness
from witcert_core.cache.sketch import Sketch, decode_sketch, encode_sketch, value_bands
from witcert_core.cache.write_queue import Write, WriteQueue, joined
from witcert_core.quantizers.base import Encoded, Quantizer
from witcert_core.quantizers.dither import group_witness_codes

UNKNOWN_CODE = 255  # decodes to +inf
EXACT_CODE = 0  # decodes to 0
SIXTEEN_BIT = (torch.float16, torch.bfloat16)


def dithered_value_radius(encoded: Encoded, stored: Tensor) -> Tensor:
    """rho [N, Hkv] float64: what the scales alone promise, plus the storage rounding.

    The packed layout keeps no norm of V's residual, so neither does its stand-in here.
    """
    rounding = (stored.double() - encoded.values.double()).square().sum(-1).sqrt()
    return half_step_radius(encoded.scales, encoded.values.shape[-1]) + rounding


@dataclass
class LayerWitness:
    """One layer's side tensors; also the `Radii` that `meter.measure` asks.

    witness [SLOTS, Hkv, B] uint8: band norms of (stored - exact) for a witness quantizer; of the storage rounding
    (stored - decoded codes) for a dithered one kept in a 16-bit pool; None where that rounding is in the dither term.
    value_witness [SLOTS, Hkv] uint8: norm of (stored - exact) of V.
    scales [SLOTS, Hkv, Gr] float16 and group_witness [SLOTS, Hkv, Gr] uint8: dithered quantizers only.
    key_sketch, value_sketch: estimates of (stored - exact); the witnesses are then of what they miss.
    """

    bands: BandMap
    value_witness: Tensor
    witness: Tensor | None = None
    scales: Tensor | None = None
    group_witness: Tensor | None = None
    sketch_bits: int = 0
    value_bands: BandMap | None = None
    key_sketch: Sketch | None = None
    value_sketch: Sketch | None = None

    def tensors(self) -> list[Tensor]:
        """Everything that is remembered about a slot."""
        return self._zero_when_exact() + [s.codes for s in (self.key_sketch, self.value_sketch) if s is not None]

    def _zero_when_exact(self) -> list[Tensor]:
        kept = [t for t in (self.witness, self.value_witness, self.scales, self.group_witness) if t is not None]
        return kept + [s.steps for s in (self.key_sketch, self.value_sketch) if s is not None]

    def key_radius(self, q: Tensor, slots: Tensor, sm_scale: float, delta_loc: float) -> Tensor:
        """c [H, S] float64 for q [H, D] float64 over the tokens in `slots` [S]; +inf where the slot is unknown."""
        parts: list[Tensor] = []
        if self.scales is not None:
            scales = self.scales[slots]
            c = radius_dither(q, scales, sm_scale, delta_loc, slots.numel())
            if self.group_witness is not None:
                stored = radius_group_witness(q, scales, self.group_witness[slots], sm_scale)
                c = torch.minimum(c, stored)
            parts.append(c)
        if self.witness is not None:
            parts.append(radius_witness(q, self.witness[slots], self.bands, sm_scale))
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def dither_law(self, q: Tensor, slots: Tensor, sm_scale: float) -> DitherLaw | None:
        """What the dither says of the errors that `key_radius` bounds, [H, S]; None for other quantizers."""
        if self.scales is None:
            return None
        scales = self.scales[slots]
        law = dither_law(q, scales, sm_scale)
        certain = law.certain
        if self.group_witness is not None:
            certain = torch.minimum(certain, radius_group_witness(q, scales, self.group_witness[slots], sm_scale))
        if self.witness is None:
            return replace(law, certain=certain)
        rounding = radius_witness(q, self.witness[slots], self.bands, sm_scale)
        return DitherLaw(law.sigma, law.bias + rounding, certain + rounding)

    def joint_key_radius(self, q: Tensor, slots: Tensor, sm_scale: float) -> Tensor | None:
        """Part of `meter.JointRadii`: the witnesses of R rows side by side."""
        if self.witness is None or self.scales is not None:
            return None
        return radius_witness(q, self.witness[slots].flatten(1, 2), self.bands, sm_scale)

    def value_radius(self, slots: Tensor) -> Tensor:
        """rho [S, Hkv] float64 >= ||stored v - exact v||, or of what the sketch misses of it."""
        return decode_norm(self.value_witness[slots])

    def residuals(self, slots: Tensor) -> tuple[Tensor, Tensor] | None:
        """Estimates of (stored - exact) of K [S, Hkv, D] and V [S, Hkv, Dv], float64; None without sketches."""
        if self.key_sketch is None or self.value_sketch is None or self.value_bands is None:
            return None
        k, v = (Sketch(s.codes[slots], s.steps[slots]) for s in (self.key_sketch, self.value_sketch))
        return decode_sketch(k, self.bands, self.sketch_bits), decode_sketch(v, self.value_bands, self.sketch_bits)

    def head(self, kv_head: int) -> LayerWitness:
        """The same side tensors for one KV head only (Hkv = 1), sharing memory with these."""
        only = slice(kv_head, kv_head + 1)
        witness, scales, group_witness = (
            None if t is None else t[:, only] for t in (self.witness, self.scales, self.group_witness)
        )
        key_sketch, value_sketch = (
            None if s is None else Sketch(s.codes[:, only], s.steps[:, only])
            for s in (self.key_sketch, self.value_sketch)
        )
        return replace(
            self,
            value_witness=self.value_witness[:, only],
            witness=witness,
            scales=scales,
            group_witness=group_witness,
            key_sketch=key_sketch,
            value_sketch=value_sketch,
        )

    def at(self, slots: Tensor, device: torch.device) -> LayerWitness:
        """Copies of the side tensors of `slots` [S] only, one after the other, on `device`."""

        def of(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[slots].to(device)

        key_sketch, value_sketch = (
            None if s is None else Sketch(s.codes[slots].to(device), s.steps[slots].to(device))
            for s in (self.key_sketch, self.value_sketch)
        )
        return replace(
            self,
            value_witness=self.value_witness[slots].to(device),
            witness=of(self.witness),
            scales=of(self.scales),
            group_witness=of(self.group_witness),
            key_sketch=key_sketch,
            value_sketch=value_sketch,
        )

    def is_exact(self, slots: Tensor) -> Tensor:
        """bool [S]: whether keys and values of every head here have radius 0 in `slots` [S]."""
        return self.exact_heads(slots).all(1)

    def exact_heads(self, slots: Tensor) -> Tensor:
        """bool [S, Hkv]: heads whose key and value have radius 0 in `slots` [S], so that nothing differs there."""
        exact = self.value_witness[slots] == 0
        if bool(exact.any()):  # of a cache whose every token is quantized this is all there is to ask
            for tensor in self._zero_when_exact():
                exact &= (tensor[slots] == 0).flatten(2).all(2) if tensor.dim() > 2 else tensor[slots] == 0
        return exact

    def mark_exact(self, slots: Tensor) -> None:
        """The cache holds exactly what the run handed over in `slots`."""
        self.fill(slots, EXACT_CODE)

    def fill(self, slots: Tensor, code: int) -> None:
        """Mark `slots` exact (EXACT_CODE) or unknown (UNKNOWN_CODE)."""
        self.value_witness[slots] = code
        if self.witness is not None:
            self.witness[slots] = code
        if self.group_witness is not None:
            self.group_witness[slots] = code
        if self.scales is not None:
            self.scales[slots] = 0.0 if code == EXACT_CODE else float("inf")
        for sketch in (self.key_sketch, self.value_sketch):
            if sketch is not None:
                sketch.steps[slots] = 0


Recorder = Callable[[LayerWitness, Write], None]


class WitnessStore:
    """The side tensors of all metered layers of one rank.

    recorder: what keeps the norms of a write in the place of torch, at once; for a store without dither and sketches.
    layers: global layer ids. storage_dtype: the dtype of the engine's pool. sketch_bits: 0, or bits a channel of the
    residuals' sketches. With `keep_exact` the exact K and V of
    every slot are kept as well (2 * SLOTS * Hkv * D elements a layer), which is what an audit compares against.
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
        self.quantizer = quantizer
        self.bands = bands
        self.storage_dtype = storage_dtype
        # With sketches a dithered quantizer is one like any other: what is kept is the error it made, not its law.
        self.dithered = quantizer.tier == "probabilistic" and not sketch_bits
        self.sketch_bits = sketch_bits
        self.value_bands = value_bands(v_head_dim)
        num_groups = -(-head_dim // 32)

        def tensor(*tail: int, value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((num_slots, num_kv_heads, *tail), value, dtype=dtype, device=device)

        def sketch(channels: int, num_bands: int) -> Sketch | None:
            if not sketch_bits:
                return None
            width = -(-channels * sketch_bits // 8)
            return Sketch(tensor(width, value=0, dtype=torch.uint8), tensor(num_bands, value=0, dtype=torch.uint8))

        # In a 32-bit pool the dither term's own slack covers the rounding of s * (code - u); see `radii.py`.
        with_witness = not self.dithered or storage_dtype in SIXTEEN_BIT
        self._layers = {
            layer: LayerWitness(
                bands=bands,
                value_witness=tensor(value=UNKNOWN_CODE, dtype=torch.uint8),
                witness=tensor(bands.num_bands, value=UNKNOWN_CODE, dtype=torch.uint8) if with_witness else None,
                scales=tensor(num_groups, value=float("inf"), dtype=torch.float16) if self.dithered else None,
                group_witness=tensor(num_groups, value=UNKNOWN_CODE, dtype=torch.uint8)
                if self.dithered and quantizer.stored_witness
                else None,
                sketch_bits=sketch_bits,
                value_bands=self.value_bands,
                key_sketch=sketch(head_dim, bands.num_bands),
                value_sketch=sketch(v_head_dim, self.value_bands.num_bands),
            )
            for layer in layers
        }
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
            self._remember(side, piece)

    def _remember(self, side: LayerWitness, write: Write) -> None:
        slots = write.slots
        if write.encoded_v is None or not self.dithered:
            missed = self._sketched(side.value_sketch, slots, write.exact_v, write.stored_v, self.value_bands)
            side.value_witness[slots] = value_codes(write.exact_v, missed)
        else:
            checked = replace(write.encoded_v, scales=checked_scales(write.encoded_v, write.exact_v))
            codes = encode_norm_up(dithered_value_radius(checked, write.stored_v))
            unknown = codes == UNKNOWN_CODE
            if bool(unknown.any()):  # no scale says it, or none of float16's can: what was stored does
                codes = torch.where(unknown, value_codes(write.exact_v, write.stored_v), codes)
            side.value_witness[slots] = codes
        if self.dithered:
            self._write_dithered(side, write)
        elif side.witness is not None:
            missed = self._sketched(side.key_sketch, slots, write.exact_k, write.stored_k, self.bands)
            side.witness[slots] = witness_codes(write.exact_k, missed, self.bands)

    def _sketched(self, sketch: Sketch | None, slots: Tensor, exact: Tensor, stored: Tensor, bands: BandMap) -> Tensor:
        """Sketch (stored - exact) into `slots` and return the corrected tensor; without a sketch `stored` itself."""
        if sketch is None:
            return stored
        made = encode_sketch(stored.to(torch.float64) - exact.to(torch.float64), bands, self.sketch_bits)
        sketch.codes[slots], sketch.steps[slots] = made.codes, made.steps
        return stored.to(torch.float64) - decode_sketch(made, bands, self.sketch_bits)

    def _write_dithered(self, side: LayerWitness, write: Write) -> None:
        slots, encoded = write.slots, write.encoded_k
        if encoded is None or side.scales is None:
            pairs = (write.exact_k, write.stored_k), (write.exact_v, write.stored_v)
            alike = [((exact == stored) & exact.isfinite()).flatten(1).all(1) for exact, stored in pairs]
            same = torch.stack(alike).all(0)
            side.fill(slots[same], EXACT_CODE)
            side.fill(slots[~same], UNKNOWN_CODE)
            return
        scales = checked_scales(encoded, write.exact_k)
        side.scales[slots] = scales
        if side.group_witness is not None:
            side.group_witness[slots] = group_witness_codes(write.exact_k, encoded.values, scales)
        if side.witness is not None:
            side.witness[slots] = witness_codes(encoded.values, write.stored_k, self.bands)

    def keep(self, layer: int, slots: Tensor, exact_k: Tensor, exact_v: Tensor) -> None:
        """Keep the exact tensors of `slots` for audits, if this store keeps any."""
        if layer in self.exact_k:
            self.exact_k[layer][slots] = exact_k.to(self.storage_dtype)
            self.exact_v[layer][slots] = exact_v.to(self.storage_dtype)

    def move(self, target: Tensor, source: Tensor) -> None:
        """The engine copied rows of its pool, all layers: `source` [N] onto `target` [N]; what is known goes along."""
        with self._void_if_it_fails(self._layers, target):
            for layer in self._layers:
                for tensor in self._settled(layer).tensors():
                    tensor[target] = tensor[source]
        for kept in (*self.exact_k.values(), *self.exact_v.values()):
            kept[target] = kept[source]

    def mark_exact(self, layer: int, slots: Tensor) -> None:
        """The pool holds exactly what the run handed over in `slots` (radius 0)."""
        with self._void_if_it_fails([layer], slots):
            self._settled(layer).fill(slots, EXACT_CODE)

    def mark_unknown(self, layer: int, slots: Tensor) -> None:
        """Nothing is known about `slots` any more (radius infinity)."""
        with self._void_if_it_fails([layer], slots):
            self._settled(layer).fill(slots, UNKNOWN_CODE)
