"""Device functions of the dithered cache's radii."""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# mypy: disable-error-code="assignment"
# Triton has no starred tuples.
# ruff: noqa: RUF005

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from witcert_core.kernels.device.tiles import load_codes
from witcert_core.kernels.host import slack

dot_error = triton.constexpr_function(slack.dot_error)
int8_dot_error = triton.constexpr_function(slack.int8_dot_error)
_ARITHMETIC = tl.constexpr(slack.MAX_CODE * (1.0 + 2.0**-15) * slack.RADIUS_UP)
_CERTAIN = tl.constexpr(0.5 * (1.0 + 2.0**-15) * slack.RADIUS_UP)
_PROXY_ROOT = tl.constexpr(((1.0 - 4.0**-8) / 12.0) ** 0.5)
_BIAS_TERM = tl.constexpr((2.0**-9 + 2.0**-16) * slack.RADIUS_UP)
_WITNESS_UNIT = tl.constexpr(32.0**0.5 / 510.0 * (1.0 + 2.0**-15) * slack.RADIUS_UP)


class Spread(NamedTuple):
    """A query's part in the radii of dithered tokens: tuples by group of ``scale ||q_g||_1`` and of
    ``scale^2 ||q_g||^2``; and ``[M]`` the tail, factors of the first in both radii, arithmetic included, and in the
    arithmetic alone, and whether all this is finite."""

    norm1: tl.tensor
    square: tl.tensor
    tail: tl.tensor
    certain: tl.tensor
    likely: tl.tensor
    arithmetic: tl.tensor
    known: tl.tensor


@triton.jit
def spread_of(q, lost, scale, tail, NG: tl.constexpr, DOT_ERROR: tl.constexpr, DIGITS: tl.constexpr):
    """:class:`Spread` of a tuple of ``[32, M]`` queries, rounded up.

    ``tail [M]`` of :func:`union_tail`, infinite for the half-step radius alone. ``lost`` as :func:`query_digits` has
    it. The product with the codes errs by at most ``DOT_ERROR`` and what the digits lost, of ``127.5 s_g ||q_g||_1``;
    the largest such share of any group stands for all of them.
    """
    norm1 = ()
    square = ()
    share = tl.max(tl.abs(q[0].to(tl.float32)), 0) * 0.0
    whole = share
    for g in tl.static_range(NG):
        single = q[g].to(tl.float32)
        sum1 = tl.sum(tl.abs(single), 0)
        if DIGITS:
            part = lost[g] / tl.where(sum1 > 0.0, sum1, 1.0)
            share = tl.where(part <= share, share, part)
        whole += sum1
        norm1 = norm1 + (sum1 * scale,)
        # Rounded up: the sum of 32 squares is within 2^-18.
        square = square + (tl.sum(single * single, 0) * (scale * scale * (1.0 + 2.0**-17)),)
    arithmetic = (share + DOT_ERROR) * _ARITHMETIC
    finite = tail < float("inf")
    likely = tl.where(finite, _BIAS_TERM, _CERTAIN) + arithmetic
    tail = tl.where(finite, tail * _PROXY_ROOT, 0.0)
    return Spread(norm1, square, tail, arithmetic + _CERTAIN, likely, arithmetic, whole * scale < float("inf"))


@triton.jit
def quantization_radius(spread, s, witness_ptr, line, live, N: tl.constexpr, M: tl.constexpr, NG: tl.constexpr):
    """Smaller of the half-step radius and the probable one, or the stored witness's where there is one and it is
    smaller, and the INT8 product's own error ``[N, M]``, from a tuple of scales ``[N]``."""
    l1 = tl.zeros((N, M), tl.float32)
    variance = tl.zeros((N, M), tl.float32)
    for g in tl.static_range(NG):
        l1 += spread.norm1[g][None, :] * s[g][:, None]
        variance += spread.square[g][None, :] * (s[g] * s[g])[:, None]
    likely = spread.tail[None, :] * tl.sqrt(variance) + l1 * spread.likely[None, :]
    certain = l1 * spread.certain[None, :]
    c = tl.where(likely < certain, likely, certain)
    if witness_ptr is not None:
        stored = tl.zeros((N, M), tl.float32)
        codes = load_codes(witness_ptr, line, live, NG)
        for g in tl.static_range(NG):
            norm = tl.sqrt(spread.square[g])
            stored += norm[None, :] * (s[g] * codes[g])[:, None]
        stored = stored * _WITNESS_UNIT + l1 * spread.arithmetic[None, :]
        c = tl.where(stored < c, stored, c)
    return c
