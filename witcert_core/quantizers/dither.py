"""Subtractive dither for the INT8 cache: Philox4x32-10, quantization, and its group witness.

``x_hat = s * (round(x/s + u) - u)`` with ``u`` uniform on ``(j + 1/2)/256 - 1/2``. The residual lies in
``[-s/2, s/2]`` for every ``u``, which is the deterministic radius; its law gives the probabilistic one.
All tokens written in one forward pass share a dither vector ``u``; a pass id names the pass.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.errors import InputError

GROUP = 32
"""Channels that share one scale."""
GRID_BITS = 8
"""The dither takes 2^GRID_BITS equally likely values."""
MAX_PASS_ID = 2**32 - 1
"""Pass ids are uint32; 0 means never written, and this last one is never issued."""

_ROUND_MULT = (0xD2511F53, 0xCD9E8D57)
_KEY_STEP = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
FP16_MAX = torch.finfo(torch.float16).max

HALF_STEP_MARGIN = 1.0 + 2.0**-15
"""A dequantized key in fp32 may be this much more than half a step away: division, sum and product round."""
LAYERS_AT_ONCE = 32
"""Whose dither is drawn together on the host, for the passes that write now."""
_NORM_UP = 1.0 + 2.0**-40
"""Covers the float64 rounding of a norm over one group."""


def _mul_hi_lo(a: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of ``a * multiplier``, both uint32 values held in int64.

    The product needs 64 bits without a sign; int64 wraps around, and its bits are those.
    """
    product = a * multiplier
    return (product >> 32) & _WORD, product & _WORD


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Ten rounds of Philox4x32 (Salmon et al., SC 2011).

    Args:
        counter: four int64 ``[...]`` that broadcast together, each holding uint32 values.
        key: two uint32 values.

    Returns:
        Four int64 ``[...]`` of uint32 values.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        hi0, lo0 = _mul_hi_lo(c0, _ROUND_MULT[0])
        hi1, lo1 = _mul_hi_lo(c2, _ROUND_MULT[1])
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _KEY_STEP[0]) & _WORD, (k1 + _KEY_STEP[1]) & _WORD
    return c0, c1, c2, c3


@dataclass(frozen=True)
class DitherKey:
    """What the Philox key is derived from; equal on all tensor-parallel ranks of one replica.

    Args:
        seed: operator's seed, any integer.
        nonce: drawn anew at every start of the server, stored with any persisted cache.
        dp_rank: data-parallel rank.
    """

    seed: int
    nonce: int
    dp_rank: int = 0

    def words(self) -> tuple[int, int]:
        """The 64-bit key as two uint32 words (BLAKE2b of the three fields)."""
        text = f"witcert-dither-1:{self.seed}:{self.nonce}:{self.dp_rank}".encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def dither_vectors(key: DitherKey, pass_ids: Tensor, layer: int, head_ids: Sequence[int], head_dim: int) -> Tensor:
    """Dither of each row and head, float32 ``[N, H, D]`` on the grid ``(j + 1/2)/256 - 1/2``.

    Args:
        pass_ids: int64 ``[N]``, forward-pass counters in ``1..2^32-2``.
        layer: layer index of the whole model.
        head_ids: **global** KV head of each of this rank's ``H`` heads.
        head_dim: ``D``.

    The counter is ``(pass id, layer, head, channel // 16)``; byte ``channel % 16`` of its 16 little-endian
    output bytes is ``j``.
    """
    for name, value in (("layer", layer), *(("head id", x) for x in head_ids)):
        if not 0 <= value <= _WORD:
            raise InputError(f"{name} is {value}; it must be a uint32 counter word")
    # A device is not waited for: whoever writes there counts passes and stops in time (`Runtime.begin`).
    if pass_ids.device.type != "cpu" or not pass_ids.numel():
        return _drawn(key, pass_ids, torch.tensor(layer, device=pass_ids.device), head_ids, head_dim)
    passes, which = torch.unique(pass_ids.to(torch.int64), return_inverse=True)
    first, last = int(passes[0]), int(passes[-1])
    if not 0 <= first <= last <= MAX_PASS_ID:
        raise InputError(
            f"pass ids run from {first} to {last}; beyond 0..{MAX_PASS_ID} a row would repeat, so refuse the write"
        )
    if first != last:
        return _drawn(key, passes, torch.tensor(layer), head_ids, head_dim)[which]
    # What a pass writes: its other layers come next, and drawing is many operations on few numbers.
    block, row = divmod(layer, LAYERS_AT_ONCE)
    return _of_pass(key, first, block, tuple(head_ids), head_dim)[row].expand(pass_ids.numel(), -1, -1)


@functools.lru_cache(maxsize=8)
def _of_pass(key: DitherKey, pass_id: int, block: int, head_ids: tuple[int, ...], head_dim: int) -> Tensor:
    """``[LAYERS_AT_ONCE, H, D]`` of layers ``block * LAYERS_AT_ONCE`` and on. Nobody may write to it."""
    layers = torch.arange(block * LAYERS_AT_ONCE, (block + 1) * LAYERS_AT_ONCE)
    return _drawn(key, torch.tensor(pass_id), layers, head_ids, head_dim)


def _drawn(key: DitherKey, pass_ids: Tensor, layers: Tensor, head_ids: Sequence[int], head_dim: int) -> Tensor:
    """``[N, H, D]`` for ids and layers, int64 ``[N]`` each, or one of them for all."""
    device = pass_ids.device
    blocks = -(-head_dim // 16)
    ids, layers = (x.to(torch.int64).reshape(-1, 1, 1) for x in (pass_ids, layers))
    heads = torch.as_tensor(list(head_ids), dtype=torch.int64, device=device).reshape(1, -1, 1)
    block = torch.arange(blocks, device=device).reshape(1, 1, -1)
    words = philox4x32((ids, layers, heads, block), key.words())
    shifts = torch.arange(0, 32, 8, device=device)
    byte = (torch.stack(words, dim=-1)[..., None] >> shifts) & 0xFF
    flat = byte.reshape(-1, heads.shape[1], blocks * 16)[..., :head_dim]
    return (flat.to(torch.float32) + 0.5) / 256.0 - 0.5


def num_groups(head_dim: int, group: int = GROUP) -> int:
    """Scales per token and head: ``ceil(D / group)``."""
    return -(-head_dim // group)


def _spread(scales: Tensor, head_dim: int, group: int) -> Tensor:
    """One float64 scale per channel, ``[..., D]`` from ``[..., Gr]``."""
    spread: Tensor = scales.to(torch.float64).repeat_interleave(group, dim=-1)
    return spread[..., :head_dim]


def group_scales(x: Tensor, group: int = GROUP) -> Tensor:
    """fp16 scales ``[..., Gr]``, the smallest with ``127 * s >= max|x|`` in the group.

    A group holding NaN, infinity or more than fp16 can scale gets ``s = +inf``: its radius is infinite and
    the meter 1. It is never clipped.
    """
    head_dim = x.shape[-1]
    pad = num_groups(head_dim, group) * group - head_dim
    magnitude = torch.nn.functional.pad(x.to(torch.float64).abs(), (0, pad))
    amax = magnitude.reshape(*x.shape[:-1], num_groups(head_dim, group), group).amax(dim=-1)
    wanted = amax / 127.0
    half = wanted.to(torch.float16)
    infinity = torch.full_like(half, float("inf"))
    # 127 * s is exact in float64 (7 + 11 bits), so this test has no rounding of its own.
    half = torch.where(half.to(torch.float64) * 127.0 < amax, torch.nextafter(half, infinity), half)
    return torch.where(amax <= FP16_MAX * 127.0, half, infinity)


def quantize_int8(x: Tensor, u: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Dithered INT8 codes and scales.

    Args:
        x: ``[N, H, D]`` float.
        u: ``[N, H, D]`` (or broadcastable) from :func:`dither_vectors`.

    Returns:
        ``codes`` int8 ``[N, H, D]`` within ``-127..127`` and ``scales`` fp16 ``[N, H, Gr]``. Channels of a
        group without a finite scale, or with scale 0, have code 0.
    """
    scales = group_scales(x, group)
    s = _spread(scales, x.shape[-1], group)
    usable = (s > 0) & s.isfinite()
    steps = torch.where(usable, x.to(torch.float64) / torch.where(usable, s, 1.0), 0.0)
    codes = torch.where(usable, torch.round(steps + u.to(torch.float64)), 0.0)
    return codes.to(torch.int8), scales


def dequantize_int8(codes: Tensor, scales: Tensor, u: Tensor, group: int = GROUP) -> Tensor:
    """``s * (code - u)`` as float32 ``[N, H, D]``; 0 where the scale is infinite (radius infinite there)."""
    s = _spread(scales, codes.shape[-1], group)
    value = s * (codes.to(torch.float64) - u.to(torch.float64))
    return torch.where(s.isfinite(), value, 0.0).to(torch.float32)


def _witness_unit(scales: Tensor, group: int) -> Tensor:
    """Norm of one witness step, ``s * sqrt(group) / (2 * 255)``, float64 ``[..., Gr]``."""
    return scales.to(torch.float64) * (math.sqrt(group) / 510.0)


def group_witness_codes(exact: Tensor, stored: Tensor, scales: Tensor, group: int = GROUP) -> Tensor:
    """Residual norm of each group in units of ``s * sqrt(32) / 510``, rounded up.

    Args:
        exact, stored: ``[N, H, D]``.
        scales: fp16 ``[N, H, Gr]``.

    Returns:
        uint8 ``[N, H, Gr]``. Code 255 is the deterministic half-step radius. A residual beyond it
        (NaN, or a stored key that was altered) cannot be expressed.

    Raises:
        InputError: a residual is larger than code 255 can hold while its scale is finite.
    """
    head_dim = exact.shape[-1]
    pad = num_groups(head_dim, group) * group - head_dim
    residual = stored.to(torch.float64) - exact.to(torch.float64)
    padded = torch.nn.functional.pad(residual, (0, pad))
    grouped = padded.reshape(*residual.shape[:-1], num_groups(head_dim, group), group)
    norm = torch.linalg.vector_norm(grouped, dim=-1)
    unit = _witness_unit(scales, group)
    known = (unit > 0) & unit.isfinite()
    steps = torch.ceil(norm / torch.where(known, unit, 1.0) * _NORM_UP)
    # An infinite scale reads back as an infinite norm whatever the code; scale 0 stored an exact 0.
    code = torch.where(known, steps, torch.where(norm == 0, 0.0, torch.where(unit > 0, 255.0, float("inf"))))
    # Rounding of the dequantized key to float32 may carry a full half-step residual just past code 255;
    # decode_group_witness adds that margin.
    limit = 255.0 * HALF_STEP_MARGIN * _NORM_UP
    over = known & ~(norm <= unit * limit) | (~known & code.isinf())
    if bool(over.any()):
        raise InputError(
            f"{int(over.sum())} groups have a residual above half a quantization step, which a group witness "
            "cannot hold; store them exactly or use band witnesses"
        )
    return code.clamp(max=255.0).to(torch.uint8)


def decode_group_witness(codes: Tensor, scales: Tensor, group: int = GROUP) -> Tensor:
    """Upper bound of each group's residual norm, float64 ``[N, H, Gr]``; infinite where the scale is."""
    unit = _witness_unit(scales, group)
    value = codes.to(torch.float64) * unit * (HALF_STEP_MARGIN * _NORM_UP**2)
    return torch.where(unit.isfinite(), value, float("inf"))
