"""Queries as two signed bytes each, so that their products with int8 codes are exact and need no conversion of codes.

A group of 32 channels of a query shares a unit, a power of two: ``q ~ unit (256 high + low)``. Numbers of 16 bit are
met exactly unless they are small beside the largest of their group (bfloat16: below 1/64 of it); what is lost is
known, and is part of the radius.

Shapes: M (query row, head) pairs of a tile, N tokens, NG = ceil(D / 32) groups.
"""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# mypy: disable-error-code="assignment,index"
# Triton has no starred tuples.
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

_LEAST = tl.constexpr(30)
"""Least biased exponent of a unit: products with it do not underflow."""
_FULL = tl.constexpr(0x7EFF00)
"""Least fraction bits of a number that 2^14 brings to 32639.5 or more; two signed bytes hold ``256 * 127 + 127``."""


@triton.jit
def query_digits(q, NG: tl.constexpr, M: tl.constexpr):
    """Of a tuple of ``[32, M]`` queries, tuples of their digits (:func:`laid_out`), of fp32 units ``[M]``, NaN where a
    query is not finite, and of the sums ``[M]`` of what was lost."""
    digits = ()
    units = ()
    lost = ()
    for g in tl.static_range(NG):
        x = q[g].to(tl.float32)
        largest = tl.max(tl.abs(x), 0)
        # A NaN may not reach the maximum; it reaches the sum.
        finite = tl.sum(tl.abs(x), 0) < float("inf")
        # Sixteen bits below the largest, or fifteen where it is so near a power of two that its digits would not fit.
        bits = largest.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 14 + ((bits & 0x7FFFFF) >= _FULL).to(tl.int32)
        exponent = tl.where(finite, tl.where(exponent < _LEAST, _LEAST, exponent), 127)
        unit = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        # Nearest integer, by leaving no fraction bits; a power of two scales exactly.
        steps = tl.where(finite[None, :], x * inverse[None, :], 0.0)
        whole = (steps + 12582912.0) - 12582912.0
        number = whole.to(tl.int32)
        high = (number + 128) >> 8
        low = number - high * 256
        both = laid_out(high.to(tl.int8), low.to(tl.int8), M)
        digits = digits + (both,)
        # Both are multiples of the last bit of the smaller: the difference is exact.
        lost = lost + (tl.sum(tl.abs(steps - whole), 0) * unit,)
        # Nothing is made of this product but a second use of the digits, for which Triton keeps them in registers: the
        # operand of a single product is loaded, byte by byte, in every turn of the loop.
        idle = tl.max(digit_product(tl.full((16, 32), 1, tl.int8), both, 16, M), 0) * 0.0
        units = units + (tl.where(finite, unit, float("nan")) + idle,)
    return digits, units, lost


@triton.jit
def laid_out(high, low, M: tl.constexpr):
    """Two digits ``[32, M]`` as :func:`digit_product` takes them: a pair's side by side in one ``[32, 2 M]`` where
    ``M`` is less than the 8 columns of a tensor core, which it then fills; else two operands."""
    if M < 8:
        return (tl.reshape(tl.join(high, low), (32, 2 * M)),)
    else:
        return (high, low)


@triton.jit
def digit_product(codes, digits, N: tl.constexpr, M: tl.constexpr):
    """``sum_i codes_i q_i / unit`` ``[N, M]`` of int8 codes ``[N, 32]`` and digits.

    Exact up to the conversion to fp32: sums of 32 products of bytes, and 256 times one, are within 2^27.
    """
    if M < 8:
        high, low = tl.split(tl.reshape(tl.dot(codes, digits[0]), (N, M, 2)))
        return (high * 256 + low).to(tl.float32)
    else:
        return (tl.dot(codes, digits[0]) * 256 + tl.dot(codes, digits[1])).to(tl.float32)
