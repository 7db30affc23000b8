"""A few bits a channel of what quantization took away, so that a bound need not assume the worst direction.

A witness keeps the *size* of a residual ``r = stored - exact``; Cauchy-Schwarz then has to assume that it points along
the query. A sketch keeps an estimate ``r^`` of the residual itself, and the witness the size of ``r - r^``. With
``p^`` the weights of the corrected keys ``stored - r^``,

    TV(exact, served) <= TV(exact, corrected) + TV(corrected, served),

where the second term is computed and only the first is bounded, from the much smaller radii of ``r - r^``. Any estimate
is sound: its error is in the witness.

Per band of a head: one byte for the step, 2, 4 or 8 bits a channel for ``round(r / step - 1/2) + 1/2`` steps.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.cache.bands import BandMap, group_map
from witcert_core.errors import InputError
from witcert_core.quantizers.packing import pack_bits

SKETCH_BITS = (2, 4, 8)
_OFFSET, _PER_OCTAVE = 140.0, 6.0  # steps from 2^-23 to 2^19, 12 % apart: float16 residuals at both ends


@dataclass(frozen=True)
class Sketch:
    """N vectors of Hkv heads: codes uint8 [N, Hkv, ceil(D * bits / 8)], steps uint8 [N, Hkv, B], 0 for no residual."""

    codes: Tensor
    steps: Tensor


def value_bands(v_head_dim: int) -> BandMap:
    """Groups of channels of V that share a step, about 16 a head."""
    return group_map(v_head_dim, max(1, v_head_dim // 16))


def sketch_bytes(num_channels: int, num_bands: int, bits: int) -> int:
    """Bytes of one head's sketch."""
    return -(-num_channels * bits // 8) + num_bands if bits else 0


def encode_sketch(residual: Tensor, bands: BandMap, bits: int) -> Sketch:
    """Sketch of `residual` [N, Hkv, D]; a vector that is not finite has none (its witness is infinite already)."""
    if bits not in SKETCH_BITS:
        raise InputError(f"a sketch has {bits} bits a channel; allowed are {', '.join(map(str, SKETCH_BITS))}")
    r = residual.to(torch.float64)
    r = torch.where(r.isfinite().all(-1, keepdim=True), r, 0.0)
    index = bands.channel_band.to(r.device).expand(r.shape)
    peak = torch.zeros(*r.shape[:-1], bands.num_bands, dtype=torch.float64, device=r.device)
    peak = peak.scatter_reduce(-1, index, r.abs(), "amax")
    half = 2 ** (bits - 1)
    # The smallest step that reaches the peak; below the range a band has no sketch, above it is cut off.
    steps = torch.ceil(torch.log2(peak / half) * _PER_OCTAVE + _OFFSET).clamp(0, 255).to(torch.uint8)
    step = _step(steps).gather(-1, index)
    levels = torch.floor(torch.where(step > 0, r / step, 0.0)).clamp(-half, half - 1) + half
    return Sketch(pack_bits(levels.to(torch.uint8), bits), steps)


def decode_sketch(sketch: Sketch, bands: BandMap, bits: int) -> Tensor:
    """The estimate ``r^`` [N, Hkv, D] float64 of `encode_sketch`'s residual."""
    device = sketch.codes.device
    levels = _levels(bits, device)[sketch.codes.to(torch.int64)].flatten(-2)[..., : bands.head_dim]
    estimate: Tensor = levels * _step(sketch.steps)[..., bands.channel_band.to(device)]
    return estimate


@functools.lru_cache(maxsize=8)
def _levels(bits: int, device: torch.device) -> Tensor:
    """float64 [256, 8 / bits]: how many steps each part of a byte stands for."""
    shifts = torch.arange(8 // bits) * bits
    levels = (torch.arange(256)[:, None] >> shifts) & (2**bits - 1)
    table: Tensor = (levels.to(torch.float64) - 2 ** (bits - 1) + 0.5).to(device)
    return table


@functools.lru_cache(maxsize=8)
def _steps(device: torch.device) -> Tensor:
    """float64 [256]; rounded to float32, so that a kernel's steps are these."""
    value = torch.exp2((torch.arange(256, dtype=torch.float64) - _OFFSET) / _PER_OCTAVE)
    value[0] = 0.0
    return value.to(torch.float32).to(torch.float64).to(device)


def _step(steps: Tensor) -> Tensor:
    return _steps(steps.device)[steps.to(torch.int64)]
