"""What repaired pages add to a tile: products with exact keys, and exact values.

Apart from the packed tokens, and called only where a tile has a repaired one: exact numbers beside codes would not fit
in registers.

Shapes: N tokens and M (query row, head) pairs of a tile, GV (a power of two) groups of 32 V channels.
"""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from witcert_core.kernels.device.columns import narrow, widen
from witcert_core.kernels.device.dither_terms import load_query_block
from witcert_core.kernels.device.tiles import add_whole_values, load_values


@triton.jit
def exact_keys(cache, q_base, valid, exact, exact_line, D: tl.constexpr, N: tl.constexpr, M: tl.constexpr):
    """Products ``[N, M]`` of whole queries with the keys of ``exact [N]`` tokens, and those keys' squared norms
    ``[N]``; 0 for the other tokens. Read 32 channels at a time, for the sake of registers."""
    z = tl.zeros((N, M), tl.float32)
    square = tl.zeros((N,), tl.float32)
    start = cache.k_exact + exact_line * D
    for g in tl.range(0, (D + 31) // 32, num_stages=1):
        channel = g * 32 + tl.arange(0, 32)
        q = load_query_block(q_base, valid, cache.keep, channel, D, False)
        k = tl.load(start[:, None] + channel[None, :], mask=exact[:, None] & (channel < D)[None, :], other=0.0)
        z += narrow(tl.dot(k, widen(q, M), input_precision="ieee"), M)
        x = k.to(tl.float32)
        square += tl.sum(x * x, 1)
    return z, square


@triton.jit
def add_exact_values(
    out,
    w,
    cache,
    exact,
    exact_line,
    DV: tl.constexpr,
    GV: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    P_DTYPE: tl.constexpr,
):
    """``out`` (as :func:`add_values` has it) plus ``sum_t w_t v_t`` over the ``exact [N]`` tokens with weights
    ``[N, M]``, and ``||v_t||^2`` ``[N]``, 0 for the others."""
    v = load_values(cache.v_exact + exact_line * DV, exact, DV, GV)
    out = add_whole_values(out, tl.full((M,), 1.0, tl.float32), w, v, M, P_DTYPE)
    x = v.to(tl.float32)
    return out, tl.sum(tl.sum(x * x, 2), 1)
