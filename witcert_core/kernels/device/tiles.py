"""Device functions that load tiles: codes, scales, exact keys and values, by groups of 32 channels.

Shapes: N tokens and M (query row, head) pairs of a tile, NG = ceil(D / 32) groups, GV a power of two of them.
"""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# mypy: disable-error-code="assignment,index"
# Triton has no starred tuples.
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from witcert_core.kernels.device.codes import weighable
from witcert_core.kernels.device.columns import narrow, widen
from witcert_core.kernels.device.dither_terms import load_query_block


@triton.jit
def load_groups(start, live, D: tl.constexpr):
    """Tuple of ``[N, 32]`` tiles, one per group of 32 channels, from ``start [N]``; 0 where masked or past ``D``."""
    out = ()
    for g in tl.static_range((D + 31) // 32):
        channel = g * 32 + tl.arange(0, 32)
        keep = live[:, None]
        if g * 32 + 32 > D:
            keep = keep & (channel < D)[None, :]
        out = out + (tl.load(start[:, None] + channel[None, :], mask=keep, other=0.0),)
    return out


@triton.jit
def load_queries(q_base, valid, keep_ptr, D: tl.constexpr):
    """Tuple of ``[32, M]`` queries from ``q_base [M]``, one per group, 0 at bypassed channels."""
    out = ()
    for g in tl.static_range((D + 31) // 32):
        out = out + (load_query_block(q_base, valid, keep_ptr, g * 32 + tl.arange(0, 32), D),)
    return out


@triton.jit
def load_values(start, live, D: tl.constexpr, GV: tl.constexpr):
    """``[N, GV, 32]`` from ``start [N]``: one product with the weights of each group reads it as a batch."""
    channel = (tl.arange(0, GV) * 32)[None, :, None] + tl.arange(0, 32)[None, None, :]
    keep = live[:, None, None]
    if GV * 32 > D:
        keep = keep & (channel < D)
    return tl.load(start[:, None, None] + channel, mask=keep, other=0.0)


@triton.jit
def is_scale(bits):
    """Whether fp16 ``bits`` (int16) are a scale: a finite number that is not negative."""
    return (bits >= 0) & (bits < 0x7C00)


@triton.jit
def load_scales(ptr, line, live, NG: tl.constexpr):
    """Tuple of ``[N]`` fp32 scales, 0 where they are none (:func:`is_scale`), and whether any of a token's is none.

    ``ptr`` counts int32 words of two scales where ``NG`` is even (an asynchronous copy takes no less than a
    word), fp16 numbers where it is odd.
    """
    out = ()
    wrong = (line * 0).to(tl.int32)
    if NG % 2 == 0:
        for pair in tl.static_range(NG // 2):
            word = tl.load(ptr + line * (NG // 2) + pair, mask=live, other=0)
            # Both halves at once: 0x0400 more brings what is no scale, and nothing else, to the sign bit. A carry comes
            # from a negative NaN below, and at worst calls the largest scale beside it unknown as well.
            high = (word | (word + 0x04000400)) & -0x7FFF8000
            wrong |= high
            bad = ((high >> 15) & 0x00010001) * 0xFFFF
            word = word & ~bad
            for half in tl.static_range(2):
                bits = (word >> (16 * half)).to(tl.int16)
                out = out + (bits.to(tl.float16, bitcast=True).to(tl.float32),)
    else:
        for g in tl.static_range(NG):
            bits = tl.load(ptr + line * NG + g, mask=live, other=0.0).to(tl.int16, bitcast=True)
            good = is_scale(bits)
            wrong |= tl.where(good, 0, 1)
            out = out + (tl.where(good, bits, 0).to(tl.float16, bitcast=True).to(tl.float32),)
    return out, wrong != 0


@triton.jit
def load_codes(ptr, line, live, NG: tl.constexpr):
    """Tuple of ``[N]`` fp32 witness codes; ``ptr`` counts int32 words of four where ``NG`` allows, else bytes."""
    out = ()
    if NG % 4 == 0:
        for quad in tl.static_range(NG // 4):
            words = tl.load(ptr + line * (NG // 4) + quad, mask=live, other=0)
            for byte in tl.static_range(4):
                out = out + (((words >> (8 * byte)) & 0xFF).to(tl.float32),)
    else:
        for g in tl.static_range(NG):
            out = out + (tl.load(ptr + line * NG + g, mask=live, other=0).to(tl.float32),)
    return out


@triton.jit
def load_scale_tile(ptr, line, live, NG: tl.constexpr, GV: tl.constexpr):
    """``[N, GV]`` fp32 scales from fp16 ones, 0 where they are none or past ``NG``, and where they are none."""
    group = tl.arange(0, GV)
    keep = live[:, None] & (group < NG)[None, :]
    bits = tl.load(ptr + line[:, None] * NG + group[None, :], mask=keep, other=0.0).to(tl.int16, bitcast=True)
    good = is_scale(bits)
    return tl.where(good, bits, 0).to(tl.float16, bitcast=True).to(tl.float32), ~good


@triton.jit
def add_values(out, factor, w, s, v, M: tl.constexpr, P_DTYPE: tl.constexpr):
    """``out [GV, 32, max(M, 8)]`` rescaled by ``factor [M]`` plus ``sum_t w_t s_tg v_t`` of weights ``[N, M]``, scales
    ``[N, GV]`` and ``v [N, GV, 32]``; columns as :func:`widen` lays them."""
    ws = widen((w[None, :, :] * tl.trans(s)[:, :, None]).to(P_DTYPE), M)
    v = tl.permute(weighable(v, P_DTYPE), (1, 2, 0))
    return tl.dot(v, ws, out * widen(factor, M)[None, None, :], input_precision="ieee")


@triton.jit
def add_whole_values(out, factor, w, v, M: tl.constexpr, P_DTYPE: tl.constexpr):
    """As :func:`add_values`, for values ``v [N, GV, 32]`` that are no codes: float16 ones stay what they are.

    bfloat16, which codes meet for the range of ``w s``, would round them; a weight alone is at most 1.
    """
    if tl.bfloat16 == P_DTYPE and v.dtype == tl.float16:
        return add_weighted(out, factor, w, v, M, tl.float16)
    else:
        return add_weighted(out, factor, w, v, M, P_DTYPE)


@triton.jit
def add_weighted(out, factor, w, v, M: tl.constexpr, DTYPE: tl.constexpr):
    """``out`` rescaled plus ``sum_t w_t v_t`` of weights and values in a dtype."""
    ws = widen(tl.broadcast_to(w.to(DTYPE)[None, :, :], (v.shape[1], w.shape[0], w.shape[1])), M)
    v = tl.permute(v.to(DTYPE), (1, 2, 0))
    return tl.dot(v, ws, out * widen(factor, M)[None, None, :], input_precision="ieee")


@triton.jit
def store_values(ptr, out, D: tl.constexpr, valid, GV: tl.constexpr, M: tl.constexpr):
    """``out`` as :func:`add_values` makes it at ``ptr [M]``."""
    out = narrow(out, M)
    channel = (tl.arange(0, GV) * 32)[:, None, None] + tl.arange(0, 32)[None, :, None]
    tl.store(ptr[None, None, :] + channel, out.to(ptr.dtype.element_ty), mask=valid[None, None, :] & (channel < D))
