"""What is remembered about the slots of one layer, and the radii that follow: band norms, sketches, or dither scales.

Shapes: SLOTS slots of the engine's pool, N slots written, S slots read, Hkv local KV heads, H = G * Hkv query heads,
D head_dim, Dv v_head_dim, B bands, Gr = ceil(D / 32) groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from witcert_core.cache.bands import BandMap
from witcert_core.cache.norm_codes import UNKNOWN_CODE, decode_norm, encode_norm_up, value_codes, witness_codes
from witcert_core.cache.packed import checked_scales, half_step_radius
from witcert_core.cache.radii import DitherLaw, dither_law, radius_group_witness, radius_witness
from witcert_core.cache.sketch import Sketch, decode_sketch, encode_sketch, value_bands
from witcert_core.cache.write_queue import Write
from witcert_core.quantizers.base import Encoded
from witcert_core.quantizers.dither import GROUP, group_witness_codes

EXACT_CODE = 0  # decodes to 0
Slots = TypeVar("Slots", bound="LayerWitness")


class MakeTensor(Protocol):
    """Makes a tensor ``[SLOTS, Hkv, *tail]`` of one value."""

    def __call__(self, *tail: int, value: float, dtype: torch.dtype) -> Tensor: ...


@dataclass
class LayerWitness:
    """One layer's side tensors, each [SLOTS, Hkv, ...]; also the `Radii` that `meter.measure` asks.

    value_witness [SLOTS, Hkv] uint8: norm of (stored - exact) of V. witness [SLOTS, Hkv, B] uint8: band norms, of what
    the kinds below say.
    """

    bands: BandMap
    value_witness: Tensor
    witness: Tensor | None

    def tensors(self) -> list[Tensor]:
        """Everything that is remembered about a slot."""
        return self._zero_when_exact()

    def _zero_when_exact(self) -> list[Tensor]:
        return [x for x in vars(self).values() if isinstance(x, Tensor)]

    def _mapped(self: Slots, of: Callable[[Tensor], Tensor]) -> Slots:
        tensors: dict[str, Any] = {name: of(x) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)

    def head(self: Slots, kv_head: int) -> Slots:
        """The same side tensors for one KV head only (Hkv = 1), sharing memory with these."""
        return self._mapped(lambda x: x[:, kv_head : kv_head + 1])

    def at(self: Slots, slots: Tensor, device: torch.device) -> Slots:
        """Copies of the side tensors of `slots` [S] only, one after the other, on `device`."""
        return self._mapped(lambda x: x[slots].to(device))

    def key_radius(self, q: Tensor, slots: Tensor, sm_scale: float, delta_loc: float) -> Tensor:
        """c [H, S] float64 for q [H, D] float64 over the tokens in `slots` [S]; +inf where the slot is unknown."""
        raise NotImplementedError

    def value_radius(self, slots: Tensor) -> Tensor:
        """rho [S, Hkv] float64 >= ||stored v - exact v||, or of what the sketch misses of it, for `slots` [S]."""
        return decode_norm(self.value_witness[slots])

    def residuals(self, slots: Tensor) -> tuple[Tensor, Tensor] | None:
        """Estimates of (stored - exact) of K [S, Hkv, D] and V [S, Hkv, Dv], float64; None without sketches."""
        return None

    def is_exact(self, slots: Tensor) -> Tensor:
        """bool [S]: whether keys and values of every head here have radius 0 in `slots` [S]."""
        return self.exact_heads(slots).all(1)

    def exact_heads(self, slots: Tensor) -> Tensor:
        """bool [S, Hkv]: heads whose key and value have radius 0 in `slots` [S], so that nothing differs there."""
        exact = self.value_witness[slots] == 0
        # Of a cache whose every token is quantized this is all there is to ask; a device is not waited for.
        if exact.device.type != "cpu" or bool(exact.any()):
            for tensor in self._zero_when_exact():
                exact &= (tensor[slots] == 0).flatten(2).all(2) if tensor.dim() > 2 else tensor[slots] == 0
        return exact

    def mark_exact(self, slots: Tensor) -> None:
        """The cache holds exactly what the run handed over in `slots` [N]."""
        self.fill(slots, EXACT_CODE)

    def fill(self, slots: Tensor, code: int) -> None:
        """Mark `slots` [N] exact (EXACT_CODE) or unknown (UNKNOWN_CODE)."""
        for tensor in self._zero_when_exact():
            if tensor.dtype == torch.uint8:
                tensor[slots] = code
            else:  # scales
                tensor[slots] = 0.0 if code == EXACT_CODE else float("inf")

    def remember(self, write: Write) -> None:
        """Account for tokens just written."""
        raise NotImplementedError


@dataclass
class WitnessSlots(LayerWitness):
    """Of any quantizer: `witness` has the band norms of (stored - exact) of K."""

    witness: Tensor

    @classmethod
    def unknown(cls, tensor: MakeTensor, bands: BandMap) -> WitnessSlots:
        """Slots of which nothing is known."""
        norms = (tensor(*tail, value=UNKNOWN_CODE, dtype=torch.uint8) for tail in ((), (bands.num_bands,)))
        return WitnessSlots(bands, *norms)

    def key_radius(self, q: Tensor, slots: Tensor, sm_scale: float, delta_loc: float) -> Tensor:
        """As in `LayerWitness`; no failure probability is ever spent."""
        return radius_witness(q, self.witness[slots], self.bands, sm_scale)

    def joint_key_radius(self, q: Tensor, slots: Tensor, sm_scale: float) -> Tensor:
        """Part of `meter.JointRadii`: c [R * H, S] for q [R * H, D] of R rows and their `slots` [S, R]."""
        return radius_witness(q, self.witness[slots].flatten(1, 2), self.bands, sm_scale)

    def remember(self, write: Write) -> None:
        """As in `LayerWitness`."""
        self._norms(write, write.stored_k, write.stored_v)

    def _norms(self, write: Write, k: Tensor, v: Tensor) -> None:
        """Of what is left between the exact tensors of a write and k [N, Hkv, D], v [N, Hkv, Dv]."""
        self.value_witness[write.slots] = value_codes(write.exact_v, v)
        self.witness[write.slots] = witness_codes(write.exact_k, k, self.bands)


@dataclass
class SketchSlots(WitnessSlots):
    """Estimates of (stored - exact) as well; the norms are then of what they miss.

    key_codes, value_codes [SLOTS, Hkv, ceil(D * bits / 8)] uint8 and key_steps, value_steps [SLOTS, Hkv, B] uint8: see
    `sketch.Sketch`. value_bands: which channels of V share a step.
    """

    key_codes: Tensor
    key_steps: Tensor
    value_codes: Tensor
    value_steps: Tensor
    value_bands: BandMap
    bits: int

    @classmethod
    def unknown_of(cls, tensor: MakeTensor, bands: BandMap, v_head_dim: int, bits: int) -> SketchSlots:
        """Slots of which nothing is known, for sketches of `bits` bits a channel."""
        plain, groups = WitnessSlots.unknown(tensor, bands), value_bands(v_head_dim)

        def zeros(size: int) -> Tensor:
            return tensor(size, value=0, dtype=torch.uint8)

        return cls(
            bands,
            plain.value_witness,
            plain.witness,
            key_codes=zeros(-(-bands.head_dim * bits // 8)),
            key_steps=zeros(bands.num_bands),
            value_codes=zeros(-(-v_head_dim * bits // 8)),
            value_steps=zeros(groups.num_bands),
            value_bands=groups,
            bits=bits,
        )

    def _zero_when_exact(self) -> list[Tensor]:
        return [self.value_witness, self.witness, self.key_steps, self.value_steps]

    def tensors(self) -> list[Tensor]:
        """Everything that is remembered about a slot."""
        return [*self._zero_when_exact(), self.key_codes, self.value_codes]

    def residuals(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """As in `LayerWitness`."""
        k = Sketch(self.key_codes[slots], self.key_steps[slots])
        v = Sketch(self.value_codes[slots], self.value_steps[slots])
        return decode_sketch(k, self.bands, self.bits), decode_sketch(v, self.value_bands, self.bits)

    def fill(self, slots: Tensor, code: int) -> None:
        """As in `LayerWitness`: there is no estimate either way."""
        self.value_witness[slots] = self.witness[slots] = code
        self.key_steps[slots] = self.value_steps[slots] = 0

    def remember(self, write: Write) -> None:
        """As in `LayerWitness`."""
        slots, missed = write.slots, []
        for exact, stored, bands in (
            (write.exact_k, write.stored_k, self.bands),
            (write.exact_v, write.stored_v, self.value_bands),
        ):
            made = encode_sketch(stored.to(torch.float64) - exact.to(torch.float64), bands, self.bits)
            missed.append((made, stored.to(torch.float64) - decode_sketch(made, bands, self.bits)))
        (of_k, k), (of_v, v) = missed
        self.key_codes[slots], self.key_steps[slots] = of_k.codes, of_k.steps
        self.value_codes[slots], self.value_steps[slots] = of_v.codes, of_v.steps
        self._norms(write, k, v)


@dataclass
class DitherSlots(LayerWitness):
    """Of a dithered quantizer: scales, and what they do not say.

    scales [SLOTS, Hkv, Gr] float16. group_witness [SLOTS, Hkv, Gr] uint8, where the quantizer stores one. `witness` has
    the band norms of the storage rounding (stored - decoded codes); None for a 32-bit pool, whose rounding is in the
    term of the dither.
    """

    scales: Tensor
    group_witness: Tensor | None

    @classmethod
    def unknown(cls, tensor: MakeTensor, bands: BandMap, *, stored_witness: bool, rounds_storage: bool) -> DitherSlots:
        """Slots of which nothing is known."""
        groups = -(-bands.head_dim // GROUP)
        return cls(
            bands,
            tensor(value=UNKNOWN_CODE, dtype=torch.uint8),
            tensor(bands.num_bands, value=UNKNOWN_CODE, dtype=torch.uint8) if rounds_storage else None,
            tensor(groups, value=float("inf"), dtype=torch.float16),
            tensor(groups, value=UNKNOWN_CODE, dtype=torch.uint8) if stored_witness else None,
        )

    def dither_law(self, q: Tensor, slots: Tensor, sm_scale: float) -> DitherLaw:
        """What is known of the errors of logits [H, S], for q [H, D] float64 over the tokens in `slots` [S]."""
        scales = self.scales[slots]
        law = dither_law(q, scales, sm_scale)
        if self.group_witness is not None:
            stored = radius_group_witness(q, scales, self.group_witness[slots], sm_scale)
            law = replace(law, certain=torch.minimum(law.certain, stored))
        if self.witness is None:
            return law
        rounding = radius_witness(q, self.witness[slots], self.bands, sm_scale)
        return DitherLaw(law.sigma, law.bias + rounding, law.certain + rounding)

    def key_radius(self, q: Tensor, slots: Tensor, sm_scale: float, delta_loc: float) -> Tensor:
        """As in `LayerWitness`."""
        return self.dither_law(q, slots, sm_scale).radius(delta_loc, slots.numel())

    def remember(self, write: Write) -> None:
        """As in `LayerWitness`; without codes only an exact write is accepted, else the slot becomes unknown."""
        self.value_witness[write.slots] = _value_codes(write)
        slots, encoded = write.slots, write.encoded_k
        if encoded is None:
            pairs = (write.exact_k, write.stored_k), (write.exact_v, write.stored_v)
            alike = [((exact == stored) & exact.isfinite()).flatten(1).all(1) for exact, stored in pairs]
            same = torch.stack(alike).all(0)
            self.fill(slots[same], EXACT_CODE)
            self.fill(slots[~same], UNKNOWN_CODE)
            return
        scales = checked_scales(encoded, write.exact_k)
        self.scales[slots] = scales
        if self.group_witness is not None:
            self.group_witness[slots] = group_witness_codes(write.exact_k, encoded.values, scales)
        if self.witness is not None:
            self.witness[slots] = witness_codes(encoded.values, write.stored_k, self.bands)


def _value_codes(write: Write) -> Tensor:
    """uint8 [N, Hkv]: of what the scales of V promise, or of what was stored where no scale says it."""
    if write.encoded_v is None:
        return value_codes(write.exact_v, write.stored_v)
    checked = replace(write.encoded_v, scales=checked_scales(write.encoded_v, write.exact_v))
    codes = encode_norm_up(dithered_value_radius(checked, write.stored_v))
    unknown = codes == UNKNOWN_CODE
    # No scale says it, or none of float16's can. A device is not waited for.
    if unknown.device.type != "cpu" or bool(unknown.any()):
        codes = torch.where(unknown, value_codes(write.exact_v, write.stored_v), codes)
    return codes


def dithered_value_radius(encoded: Encoded, stored: Tensor) -> Tensor:
    """rho [N, Hkv] float64 of stored V [N, Hkv, Dv]: what the scales alone promise, plus the storage rounding.

    The packed layout keeps no norm of V's residual, so neither does its stand-in here.
    """
    rounding = (stored.double() - encoded.values.double()).square().sum(-1).sqrt()
    return half_step_radius(encoded.scales, encoded.values.shape[-1]) + rounding
