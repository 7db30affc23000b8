"""Loading tiles of codes, keys and queries by groups of 32 channels, and what the dither adds to their
products."""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# mypy: disable-error-code="assignment,index"
# Triton has no starred tuples.
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from witcert_core.kernels.common.device import dither_row, dither_tile


@triton.jit
def load_groups(base, rows, row_stride, mask, FIRST, D: tl.constexpr, NG: tl.constexpr):
    """Tuple of ``[N, 32]`` tiles, one per group of 32 channels, 0 where masked or past ``D``."""
    out = ()
    for g in tl.static_range(NG):
        channel = g * 32 + tl.arange(0, 32)
        keep = mask[:, None]
        if g * 32 + 32 > D:
            keep = keep & (channel < D)[None, :]
        out = out + (tl.load(base + rows[:, None] * row_stride + channel[None, :], mask=keep, other=FIRST),)
    return out


@triton.jit
def load_words(base, rows, row_stride, mask, W: tl.constexpr, NG: tl.constexpr):
    """Tuple of ``[N, 8]`` int32 words, four codes each, one per group of 32 channels."""
    out = ()
    for g in tl.static_range(NG):
        word = g * 8 + tl.arange(0, 8)
        keep = mask[:, None]
        if g * 8 + 8 > W:
            keep = keep & (word < W)[None, :]
        out = out + (tl.load(base + rows[:, None] * row_stride + word[None, :], mask=keep, other=0),)
    return out


@triton.jit
def unpack(words, N: tl.constexpr):
    """Codes ``[N, 32]`` int32 of ``[N, 8]`` words, lowest byte first."""
    shift = 24 - 8 * tl.arange(0, 4)
    codes = (words[:, :, None] << shift[None, None, :]) >> 24
    return tl.reshape(codes, (N, 32))


@triton.jit
def load_query_group(q_base, row, row_stride, valid, g, D: tl.constexpr):
    """Queries ``[M, 32]`` of group ``g``, which need not be known at compile time."""
    channel = g * 32 + tl.arange(0, 32)
    keep = valid[:, None] & (channel < D)[None, :]
    return tl.load(q_base + row[:, None] * row_stride + channel[None, :], mask=keep, other=0.0)


@triton.jit
def row_terms(
    q_base,
    row,
    row_stride,
    valid,
    seed,
    row_id,
    layer,
    head,
    M: tl.constexpr,
    D: tl.constexpr,
    NG: tl.constexpr,
):
    """Tuple of ``kappa_g = <q_g, u_g>`` ``[M]`` of one dither row. A loop, not unrolled: code is drawn
    once."""
    column = tl.arange(0, 8)[None, :]
    table = tl.zeros((M, 8), tl.float32)
    for g in tl.range(0, NG, num_stages=1):
        q = load_query_group(q_base, row, row_stride, valid, g, D).to(tl.float32)
        u = dither_row(seed, row_id, layer, head, g)
        table = tl.where(column == g, tl.sum(q * u[None, :], 1)[:, None], table)
    out = ()
    for g in tl.static_range(NG):
        out = out + (tl.sum(tl.where(column == g, table, 0.0), 1),)
    return out


@triton.jit
def tile_terms(
    q_base,
    row,
    row_stride,
    valid,
    scales,
    row_id,
    live,
    seed,
    layer,
    head,
    N: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    NG: tl.constexpr,
):
    """``sum_g s_g <q_g, u_g>`` ``[N, M]`` where every token has a row of its own."""
    total = tl.zeros((N, M), tl.float32)
    for g in tl.range(0, NG, num_stages=1):
        q = load_query_group(q_base, row, row_stride, valid, g, D)
        s = tl.load(scales + g, mask=live, other=0.0).to(tl.float32)
        u = dither_tile(seed, row_id, layer, head, g, N).to(q.dtype)
        dot = tl.dot(u, tl.trans(q), input_precision="ieee")
        total += tl.where((s >= 0.0) & (s < float("inf")), s, 0.0)[:, None] * dot
    return total
