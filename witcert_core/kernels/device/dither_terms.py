"""Device functions of the dither: drawn by Philox from a token's pass id, and what it adds to a product with a query.

Shapes: N tokens and M (query row, head) pairs of a tile, NG = ceil(D / 32) groups.
"""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# mypy: disable-error-code="assignment"
# Triton has no starred tuples.
# ruff: noqa: RUF005

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from witcert_core.kernels.device.columns import narrow, widen


class Dither(NamedTuple):
    """Whose dither is drawn: the Philox key, the layer, and the KV head in the whole model."""

    seed: tl.tensor
    layer: tl.tensor
    head: tl.tensor


@triton.jit
def dither_block(dither, pass_ids, block, N: tl.constexpr):
    """Dither of ``pass_ids [N]`` over 16 channels, fp32 ``[N, 16]``: the bytes of one Philox call a token."""
    zero = pass_ids * 0
    w0, w1, w2, w3 = tl.philox(dither.seed, zero + pass_ids, zero + dither.layer, zero + dither.head, zero + block)
    # Joined so that the last two axes run over the words 0, 1, 2, 3.
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)).to(tl.uint32), (N, 4))
    shift = (tl.arange(0, 4) * 8).to(tl.uint32)
    byte = tl.reshape((words[:, :, None] >> shift[None, None, :]) & 0xFF, (N, 16))
    return (byte.to(tl.float32) + 0.5) * (1.0 / 256.0) - 0.5


@triton.jit
def dither_tile(dither, pass_ids, g, N: tl.constexpr):
    """Dither of ``pass_ids [N]`` over the 32 channels of a group, fp32 ``[N, 32]``."""
    block = g * 2 + tl.arange(0, 2)
    zero = pass_ids[:, None] * 0 + block[None, :] * 0
    column = zero + pass_ids[:, None]
    w0, w1, w2, w3 = tl.philox(dither.seed, column, zero + dither.layer, zero + dither.head, zero + block[None, :])
    # [N, 2, 2, 2]: as above.
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)).to(tl.uint32), (N, 8))
    shift = (tl.arange(0, 4) * 8).to(tl.uint32)
    byte = tl.reshape((words[:, :, None] >> shift[None, None, :]) & 0xFF, (N, 32))
    return (byte.to(tl.float32) + 0.5) * (1.0 / 256.0) - 0.5


@triton.jit
def load_query_block(q_base, valid, keep_ptr, channel, D: tl.constexpr):
    """Queries ``[C, M]`` at ``channel [C]``, 0 at bypassed ones: those have no code and no dither."""
    keep = channel < D
    if keep_ptr is not None:
        keep = keep & (tl.load(keep_ptr + channel, mask=keep, other=0) != 0)
    return tl.load(q_base[None, :] + channel[:, None], mask=keep[:, None] & valid[None, :], other=0.0)


@triton.jit
def shared_terms(q_base, valid, keep_ptr, dither, pass_id, SHAPE: tl.constexpr):
    """Tuple of ``kappa_g = <q_g, u_g>`` ``[M]`` of one pass's dither. A loop over blocks, not unrolled: code is
    drawn once."""
    rows: tl.constexpr = 8 if SHAPE.NG <= 8 else 16  # a group beyond them would lose its term
    tl.static_assert(rows >= SHAPE.NG)
    column = tl.arange(0, rows)[:, None]
    table = tl.zeros((rows, SHAPE.M), tl.float32)
    for b in tl.range(0, (SHAPE.D + 15) // 16, num_stages=1):
        q = load_query_block(q_base, valid, keep_ptr, b * 16 + tl.arange(0, 16), SHAPE.D).to(tl.float32)
        u = tl.reshape(dither_block(dither, tl.zeros((1,), tl.int32) + pass_id, b, 1), (16,))
        table += tl.where(column == b // 2, tl.sum(q * u[:, None], 0)[None, :], 0.0)
    out = ()
    for g in tl.static_range(SHAPE.NG):
        out = out + (tl.sum(tl.where(column == g, table, 0.0), 0),)
    return out


@triton.jit
def tile_terms(q_base, valid, keep_ptr, scales, pass_id, live, dither, SHAPE: tl.constexpr):
    """``sum_g s_g <q_g, u_g>`` ``[N, M]`` where tokens are of different passes; ``scales [N]`` point to fp16.

    Sixteen channels at a time: what is live here adds to the registers of the whole kernel.
    """
    total = tl.zeros((SHAPE.N, SHAPE.M), tl.float32)
    for b in tl.range(0, (SHAPE.D + 15) // 16, num_stages=1):
        q = load_query_block(q_base, valid, keep_ptr, b * 16 + tl.arange(0, 16), SHAPE.D)
        s = tl.load(scales + b // 2, mask=live, other=0.0).to(tl.float32)
        u = dither_block(dither, pass_id, b, SHAPE.N).to(q.dtype)
        dot = narrow(tl.dot(u, widen(q, SHAPE.M), input_precision="ieee"), SHAPE.M)
        total += tl.where((s >= 0.0) & (s < float("inf")), s, 0.0)[:, None] * dot
    return total
