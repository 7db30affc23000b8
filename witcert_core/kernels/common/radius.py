"""Device functions of the dithered cache's radii."""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# mypy: disable-error-code="assignment"
# Triton has no starred tuples.
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from witcert_core.kernels.common import slack
from witcert_core.kernels.common.device import dither_radius
from witcert_core.kernels.common.tiles import load_codes

_ARITHMETIC = tl.constexpr(slack.MAX_CODE)
_WITNESS_UNIT = tl.constexpr(32.0**0.5 / 510.0 * (1.0 + 2.0**-15) * slack.RADIUS_UP)


@triton.jit
def query_norms(q, scale, NG: tl.constexpr):
    """Tuples of ``scale ||q_g||_1`` and ``scale ||q_g||`` ``[M]``, rounded up, of a tuple of ``[32, M]``."""
    norm1 = ()
    norm2 = ()
    for g in tl.static_range(NG):
        single = q[g].to(tl.float32)
        norm1 = norm1 + (tl.sum(tl.abs(single), 0) * scale,)
        # Rounded up: the sum of 32 squares and the root are within 2^-18.
        norm2 = norm2 + (tl.sqrt(tl.sum(single * single, 0)) * (scale * (1.0 + 2.0**-18)),)
    return norm1, norm2


@triton.jit
def quantization_radius(
    norm1,
    norm2,
    s,
    codes_ptr,
    line,
    live,
    tail,
    N: tl.constexpr,
    M: tl.constexpr,
    NG: tl.constexpr,
    WITNESS: tl.constexpr,
    DOT_ERROR: tl.constexpr,
):
    """Tier D's radius, or the stored witness's where smaller, and the INT8 product's own error ``[N, M]``.

    ``norm1``, ``norm2``: tuples of ``|scale| ||q_g||`` rounded up; NaN or infinity where a scale is unknown.
    """
    l1 = tl.zeros((N, M), tl.float32)
    variance = tl.zeros((N, M), tl.float32)
    stored = tl.zeros((N, M), tl.float32)
    codes = load_codes(codes_ptr, line, live, NG) if WITNESS else ()
    for g in tl.static_range(NG):
        size = norm2[g][None, :] * s[g][:, None]
        l1 += norm1[g][None, :] * s[g][:, None]
        variance += size * size
        if WITNESS:
            stored += size * (codes[g] * _WITNESS_UNIT)[:, None]
    c = dither_radius(l1, variance, tail)
    if WITNESS:
        c = tl.where(stored < c, stored, c)
    return c + l1 * (_ARITHMETIC * DOT_ERROR)
