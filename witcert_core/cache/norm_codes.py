"""One byte per band: how far the stored key can be from the exact one, rounded up.

Codes: 0 is an exact zero; 1..238 stand for ``2^((code-160)/8)`` (2^-19.875 .. 2^9.75 in steps of 9 %), 239..246 step by
a factor of 4 up to 2^25.75, and 247..254 by 2^12.75 up to 2^127.75: what any 16-bit number can be off by has a code.
255 is "unknown", read back as +inf, which makes the meter 1.
"""

from __future__ import annotations

import functools
from functools import cache

import torch
from torch import Tensor

from witcert_core.cache.bands import BandMap
from witcert_core.errors import InputError

UNKNOWN_CODE = 255
PIECES = ((0.0, -20.0, 8.0), (238.0, 9.75, 0.5), (246.0, 25.75, 1.0 / 12.75))
"""From which code on, what binary exponent that stands for, and codes to an octave."""
_NORM_SLACK = 1.0 + 2.0**-40
"""Covers the float64 rounding of a norm over up to 2^10 channels (relative error below D * 2^-53)."""


@functools.lru_cache(maxsize=8)
def _levels(device: torch.device) -> Tensor:
    """float64 ``[256]``: what each code stands for, itself rounded up to a float32 number."""
    code = torch.arange(256, dtype=torch.float64)
    exponent = torch.zeros_like(code)
    for first, start, steps in PIECES:
        exponent = torch.where(code > first, start + (code - first) / steps, exponent)
    exact = torch.exp2(exponent)
    single = exact.to(torch.float32)
    short = single.to(torch.float64) < exact
    single = torch.where(short, torch.nextafter(single, torch.full_like(single, float("inf"))), single)
    level = single.to(torch.float64)
    level[0] = 0.0
    level[UNKNOWN_CODE] = float("inf")
    return level.to(device)


def encode_norm_up(norms: Tensor) -> Tensor:
    """Smallest code whose value is at least the norm; NaN, negative and too large norms give 255.

    Args:
        norms: ``[...]`` float32 or float64, non-negative.

    Returns:
        uint8 ``[...]``.
    """
    if not norms.dtype.is_floating_point:
        raise InputError(f"norms have dtype {norms.dtype}; a floating dtype is needed")
    value = norms.to(torch.float64)
    # Levels are at most 2^-23 above their powers of two, so this is the code or one less; faster than a search.
    octaves = value.log2()
    place = octaves * 8.0 + 160.0
    for first, start, steps in PIECES[1:]:
        place = torch.where(place > first, first + (octaves - start) * steps, place)
    code = place.sub_(1e-6).ceil_().nan_to_num_(nan=255.0).clamp_(0.0, 255.0).to(torch.int64)
    return (code + (_levels(value.device)[code] < value)).to(torch.uint8)


def decode_norm(codes: Tensor) -> Tensor:
    """float64 ``[...]`` upper bound that each uint8 code stands for; exact in float32 too."""
    if codes.dtype != torch.uint8:
        raise InputError(f"witness codes have dtype {codes.dtype}; they are stored as torch.uint8")
    return _levels(codes.device)[codes.to(torch.int64)]


def witness_codes(exact: Tensor, stored: Tensor, bands: BandMap) -> Tensor:
    """Codes of ``||(stored - exact)_band||``, uint8 ``[..., B]``.

    Args:
        exact: ``[..., D]`` the tensor handed to the cache write, in its own dtype.
        stored: ``[..., D]`` what the cache gives back, in the space attention reads.
    """
    return encode_norm_up(_norms(exact, stored, bands) * _NORM_SLACK)


def value_codes(exact: Tensor, stored: Tensor) -> Tensor:
    """Codes of ``||stored - exact||`` over all channels, uint8 ``[...]``."""
    return encode_norm_up(_norms(exact, stored, _whole(exact.shape[-1]))[..., 0] * _NORM_SLACK)


@cache
def _whole(channels: int) -> BandMap:
    """One band of all channels."""
    return BandMap(torch.zeros(channels, dtype=torch.int64), 1)


def _norms(exact: Tensor, stored: Tensor, bands: BandMap) -> Tensor:
    if exact.shape != stored.shape:
        raise InputError(f"exact has shape {tuple(exact.shape)} and stored {tuple(stored.shape)}; they must agree")
    if exact.element_size() <= 4 and stored.element_size() <= 4:
        return bands.difference_norms(stored, exact)
    return bands.norms(stored.to(torch.float64) - exact.to(torch.float64))
