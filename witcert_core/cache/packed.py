"""The packed INT8 cache: codes, scales and pass ids of every slot, and the radii that follow from them.

Shapes: SLOTS slots, N tokens written, S read, Hkv local KV heads, D head_dim, Dv v_head_dim, Gr = ceil(D / 32) groups.

At D = 128 a token takes 272 bytes per KV head: 2 * (128 codes + 4 float16 scales); the stored witness takes 4 more.
The pass id of a slot is one number for all layers and heads; the dither vectors are made again from it when read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from witcert_core.cache import outliers
from witcert_core.cache.radii import radius_dither, radius_group_witness
from witcert_core.errors import InputError
from witcert_core.quantizers.base import Encoded
from witcert_core.quantizers.dither import (
    GROUP,
    HALF_STEP_MARGIN,
    DitherKey,
    dequantize_int8,
    dither_vectors,
    group_witness_codes,
    num_groups,
)
from witcert_core.quantizers.rotary import RotarySpec

HALF_STEPS_UP = 1 + 2.0**-13
"""Covers the fp32 rounding of a dequantized value beside the half steps of its groups."""


def half_step_radius(scales: Tensor, head_dim: int) -> Tensor:
    """rho [...] float64: how far a dequantized vector can be from the exact one, ``sqrt(sum_g n_g s_g^2) / 2``.

    scales [..., Gr] float16; group g has n_g channels, 32 but for a short last one. An unknown scale gives infinity.
    """
    num_groups = scales.shape[-1]
    sizes = torch.full((num_groups,), float(GROUP), dtype=torch.float64, device=scales.device)
    sizes[-1] = head_dim - GROUP * (num_groups - 1)
    squares = scales.double().square().nan_to_num(nan=float("inf"))
    return (sizes * squares).sum(-1).sqrt() / 2 * HALF_STEPS_UP


def breaks_half_step(encoded: Encoded, exact: Tensor) -> Tensor:
    """bool [N, H]: tokens whose head is further than half a step from `exact` [N, H, D], or not a number.

    The deterministic radius rests on that half step, so it is checked and not taken from the quantizer's word.
    """
    step = encoded.scales.double().repeat_interleave(GROUP, -1)[..., : exact.shape[-1]]
    off = (encoded.values.double() - exact.double()).abs()
    return ~(off <= step / 2 * HALF_STEP_MARGIN).all(-1)


def checked_scales(encoded: Encoded, exact: Tensor) -> Tensor:
    """The scales [N, H, Gr], infinite (radius unknown) where `breaks_half_step`."""
    return encoded.scales.masked_fill(breaks_half_step(encoded, exact)[..., None], float("inf"))


@dataclass
class PackedLayer:
    """One layer's buffers, owned by the engine's pool; also the `Radii` that `meter.measure` asks.

    k, v [SLOTS, Hkv, D] int8; k_scale, v_scale [SLOTS, Hkv, Gr] float16, infinite where nothing was written;
    k_witness [SLOTS, Hkv, Gr] uint8 or None. k_bypass [SLOTS, Hkv, C] in 16 bit or None, and the channels [Hkv, C]
    int64 it holds, None until the first keys were written (`outliers.py`). Of a latent cache v and v_scale are views of
    k and k_scale, their leading channels and groups.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor
    k_witness: Tensor | None = None
    k_bypass: Tensor | None = None
    channels: Tensor | None = None

    def key_radius(self, q: Tensor, slots: Tensor, sm_scale: float, delta_loc: float) -> Tensor:
        """c [H, S] float64; see `radii.radius_dither` and `radii.radius_group_witness`."""
        if self.channels is not None:
            q = outliers.masked_query(q, self.channels)
        scales = self.k_scale[slots]
        radius = radius_dither(q, scales, sm_scale, delta_loc, slots.numel())
        if self.k_witness is None:
            return radius
        return torch.minimum(radius, radius_group_witness(q, scales, self.k_witness[slots], sm_scale))

    def value_radius(self, slots: Tensor) -> Tensor:
        """rho [S, Hkv] float64."""
        return half_step_radius(self.v_scale[slots], self.v.shape[-1])

    def residuals(self, slots: Tensor) -> None:
        """None for any `slots` [S]: the packed cache keeps no sketch."""
        return None

    def head(self, kv_head: int) -> PackedLayer:
        """The same buffers for one KV head only (Hkv = 1), sharing memory with these."""
        mine = slice(kv_head, kv_head + 1)

        def part(buffer: Tensor | None) -> Tensor | None:
            return None if buffer is None else buffer[:, mine]

        return replace(
            self,
            k=self.k[:, mine],
            v=self.v[:, mine],
            k_scale=self.k_scale[:, mine],
            v_scale=self.v_scale[:, mine],
            k_witness=part(self.k_witness),
            k_bypass=part(self.k_bypass),
            channels=None if self.channels is None else self.channels[mine],
        )

    def exact_heads(self, slots: Tensor) -> Tensor:
        """bool [S, Hkv], all False: what is stored is codes."""
        return torch.zeros(slots.numel(), self.k.shape[1], dtype=torch.bool, device=slots.device)


def of_latents(k: Tensor, k_scale: Tensor, latent_dim: int, k_witness: Tensor | None = None) -> PackedLayer:
    """A layer whose values are the first `latent_dim` channels of its keys, as these are coded.

    k [SLOTS, 1, D] int8, k_scale [SLOTS, 1, Gr] float16, k_witness [SLOTS, 1, Gr] uint8 or None.
    """
    groups = num_groups(latent_dim, GROUP)
    return PackedLayer(k, k[..., :latent_dim], k_scale, k_scale[..., :groups], k_witness)


class PackedKV:
    """All layers of one rank. `pass_ids` [SLOTS] int64 is shared by them: the pass in which a slot was written."""

    def __init__(
        self,
        layers: Mapping[int, PackedLayer],
        pass_ids: Tensor,
        key: DitherKey,
        head_ids: tuple[int, ...],
        rotary: RotarySpec,
    ) -> None:
        self.layers = dict(layers)
        self.pass_ids = pass_ids
        self.key = key
        self.head_ids = head_ids
        self.rotary = rotary

    def __getitem__(self, layer: int) -> PackedLayer:
        return self.layers[layer]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, witnesses and bypassed channels."""
        layers = self.layers.values()
        own = [] if self.rotary.latent_dim else [b for x in layers for b in (x.v, x.v_scale)]
        buffers = (b for x in layers for b in (x.k, x.k_scale, x.k_witness, x.k_bypass))
        return sum(b.nbytes for b in (*own, *buffers) if b is not None)

    def to_encode(self, layer: int, keys: Tensor) -> Tensor:
        """What of keys [N, Hkv, D] goes into codes: all of it, or all but the bypassed channels.

        Raises InputError when keys to be bypassed are not in the dtype they would be kept in.
        """
        target = self.layers[layer]
        if target.k_bypass is None:
            return keys
        if keys.dtype != target.k_bypass.dtype:
            kept = target.k_bypass.dtype
            raise InputError(f"layer {layer}: keys are {keys.dtype}, outliers are kept in {kept}; give them in that")
        channels = self.choose(layer, keys) if target.channels is None else target.channels
        return outliers.without(keys, channels)

    def choose(self, layer: int, keys: Tensor) -> Tensor:
        """The outlier channels of a layer from keys [N, Hkv, D], which hold from now on; codes stay as they are.

        Raises InputError for a layer that keeps no outliers.
        """
        target = self.layers[layer]
        if target.k_bypass is None:
            raise InputError(f"layer {layer} keeps no outliers, so it has no channels to choose")
        target.channels = outliers.outlier_channels(keys, self.rotary, target.k_bypass.shape[-1] // 2)
        return target.channels

    def write(self, layer: int, slots: Tensor, exact_k: Tensor, exact_v: Tensor, k: Encoded, v: Encoded) -> None:
        """Store the tokens of `slots` [N]: codes, scales, and the keys' witness and outliers if the layout has them.

        exact_k [N, Hkv, D], exact_v [N, Hkv, Dv]; k: of `to_encode(layer, exact_k)`. Raises InputError for codes that
        are not what their scales promise: the cache reads them with those scales.
        """
        whole_k, exact_k = exact_k, self.to_encode(layer, exact_k)
        for name, coded, exact in (("keys", k, exact_k), ("values", v, exact_v)):
            # A head that is no number has an infinite scale already.
            if bool((breaks_half_step(coded, exact) & exact.isfinite().all(-1)).any()):
                raise InputError(f"layer {layer}: codes of some {name} are more than half a step of their scale off")
        target = self.layers[layer]
        target.k[slots], target.k_scale[slots] = k.codes, k.scales
        target.v[slots], target.v_scale[slots] = v.codes, v.scales
        if target.k_witness is not None:
            target.k_witness[slots] = group_witness_codes(exact_k, k.values, k.scales)
        if target.k_bypass is not None and target.channels is not None:
            kept = outliers.taken(whole_k, target.channels)
            target.k_bypass[slots] = kept
            # A bypassed number is exact unless it is none; then nothing is known about its token.
            scales = k.scales.masked_fill(~kept.isfinite().all(-1, keepdim=True), float("inf"))
            target.k_scale[slots] = scales

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Dequantized k [S, Hkv, D] and v [S, Hkv, Dv] float32 of `slots`; each pass's dither vectors are made once."""
        source = self.layers[layer]
        passes, which = torch.unique(self.pass_ids[slots], return_inverse=True)
        u = dither_vectors(self.key, passes, layer, self.head_ids, source.k.shape[-1])[which]
        k = dequantize_int8(source.k[slots], source.k_scale[slots], u)
        if source.k_bypass is not None and source.channels is not None:
            k = outliers.put(k, source.channels, source.k_bypass[slots])
        if self.rotary.latent_dim:
            return k, k[..., : self.rotary.latent_dim]
        # Values are rounded to nearest, without dither.
        v = dequantize_int8(source.v[slots], source.v_scale[slots], torch.zeros(1, device=u.device))
        return k, v
