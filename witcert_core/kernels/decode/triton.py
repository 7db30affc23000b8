"""Split-K decode attention over INT8 pages, with the meter's sums in the same pass.

One program reads one split (512 tokens) of one request and KV head for a tile of 8 (query row, head) pairs.
V is rounded to nearest, without dither: its bound is deterministic and the same, and nothing is drawn for it.
"""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# mypy: disable-error-code="assignment,index"
# A compile-time and a run-time test cannot share one condition.
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl

from witcert_core.kernels.device.codes import code_squares
from witcert_core.kernels.device.packed_tile import packed_head, packed_queries, packed_tile
from witcert_core.kernels.device.paged import left_out, query_tile, visible_span
from witcert_core.kernels.device.radius import dot_error, int8_dot_error, quantization_radius, spread_of
from witcert_core.kernels.device.running_sums import (
    far_radius,
    fixed_radius,
    meter_start,
    meter_store,
    meter_values,
    meter_weights,
    query_length,
    sees_some,
    soft_cap,
    store_sums,
    union_tail,
    weigh,
)
from witcert_core.kernels.device.tiles import add_values, store_values
from witcert_core.kernels.host import slack

_UP = tl.constexpr(slack.RADIUS_UP)
_FIELDS = tl.constexpr(slack.META_FIELDS)
_SPLIT = tl.constexpr(slack.SPLIT_TOKENS)


@triton.jit
def value_errors(tile, SHAPE: tl.constexpr):
    """``||v||^2`` and the value radius ``[N]`` of a tile: half a step in each channel, with the 2^-13 that
    dequantization in fp32 may add; infinite where a scale is unknown."""
    v_square = tl.sum(tile.v_step * tile.v_step * code_squares(tile.v_at, SHAPE.DV, SHAPE.GV), 1)
    channels = tl.minimum(tl.maximum(SHAPE.DV - 32 * tl.arange(0, SHAPE.GV), 0), 32).to(tl.float32)
    steps = tl.where(tile.v_unknown, float("inf"), tile.v_step * tile.v_step)
    rho = tl.sqrt(tl.sum(tl.where(channels > 0.0, channels, 1.0)[None, :] * steps, 1))
    return v_square, rho * (0.5 * (1.0 + 2.0**-13) * _UP)


@triton.jit(do_not_specialize=["layer", "seed"])
def decode_split(
    q,
    cache,
    pages,
    rows,
    delta_ptr,
    flag_ptr,
    part_o_ptr,
    part_m_ptr,
    layer,
    seed,
    sm_scale,
    cap,
    window_left,
    q_len,
    num_splits,
    num_qo_heads,
    num_kv_heads,
    SHAPE: tl.constexpr,
    METER: tl.constexpr,
    MULTI: tl.constexpr,
):
    """Grid ``(requests * m_tiles, Hkv, splits)``; rows as in :func:`visible_span`, ``MULTI``: ``q_len > 1``.

    ``q``: :class:`Heads`; ``cache``: :class:`PackedPages`; ``pages``, ``rows``, ``SHAPE``: what they are named after,
    all of :mod:`~witcert_core.kernels.device.arguments`. ``cap`` and ``window_left`` are None where there is none.
    """
    if left_out(flag_ptr, METER):
        return
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    tile_number, query, valid, row, head = query_tile(q_len, kv_head, SHAPE.G, SHAPE.M)
    page0, limit, first, length = visible_span(tile_number, query, q_len, window_left, pages, rows, SHAPE.PAGE)
    begin = split * _SPLIT
    if begin >= length:
        return
    lowest = tl.min(tl.where(valid, first, length), 0)
    if window_left is not None:
        if begin + _SPLIT <= lowest:
            return
    end = tl.minimum(begin + _SPLIT, length)

    mine = packed_head(cache, pages.indices, kv_head, num_kv_heads, seed, layer, SHAPE)
    queries, q_groups, lost = packed_queries(mine, q.ptr + row * q.row + head * q.head, valid, page0, begin, SHAPE)
    scale = tl.abs(sm_scale)
    bypass_length = 0.0
    if cache.bypass is not None:
        bypass_length = query_length((queries.bypass,), SHAPE.M, 1) * scale
    if METER:
        tail = union_tail(limit - first, tl.load(delta_ptr + row, mask=valid, other=0.0))
        spread = spread_of(q_groups, lost, scale, tail, SHAPE.NG, int8_dot_error(SHAPE.NG), SHAPE.DIGITS)

    ref = tl.full((SHAPE.M,), float("-inf"), tl.float32)
    total = tl.zeros((SHAPE.N, SHAPE.M), tl.float32)
    out = tl.zeros((SHAPE.GV, 32, SHAPE.M if SHAPE.M > 8 else 8), tl.float32)
    weights, values = meter_start(SHAPE.N, SHAPE.M, SHAPE.M if MULTI else 1)
    for start in range(begin, end, SHAPE.N):
        token = start + tl.arange(0, SHAPE.N)
        live = token < end
        # Past the end the last token stands in: nothing is masked, and no other slot is read.
        tile = packed_tile(mine, queries, tl.minimum(token, end - 1), page0, SHAPE)
        z = soft_cap(tile.z * sm_scale, cap)
        visible = valid[None, :] & live[:, None]
        seen = live[:, None]
        if window_left is not None:
            visible = visible & (token[:, None] >= first[None, :])
            seen = (live & (token >= lowest))[:, None]
        if MULTI:
            visible = visible & (token[:, None] < limit[None, :])
            seen = visible
        w, ref, factor, gap = weigh(z, visible, ref)
        total = total * factor[None, :] + w
        if METER:
            c = quantization_radius(spread, tile.k_step, cache.witness, tile.line, live, SHAPE.N, SHAPE.M, SHAPE.NG)
            # Once a token what all its weights have: infinite where its radius is unknown, 0 where it is not there.
            fixed = fixed_radius(cap, tl.float32 != SHAPE.P_DTYPE)
            c += tl.where(live, tl.where(tile.unknown, float("inf"), fixed), 0.0)[:, None]
            if tl.float32 == SHAPE.P_DTYPE:
                c += far_radius(gap)
            if cache.bypass is not None:
                c += tl.sqrt(tile.bypass_square)[:, None] * bypass_length[None, :] * dot_error(SHAPE.BYPASS + 1)
            weights = meter_weights(weights, factor, w, tl.where(visible, c, 0.0))
        out = add_values(out, factor, w, tile.v_step, tile.v, SHAPE.M, SHAPE.P_DTYPE)
        if METER:
            v_square, rho = value_errors(tile, SHAPE)
            values = meter_values(values, factor, w, v_square, tl.where(live, rho, 0.0), seen)

    cell = (row * num_qo_heads + head) * num_splits + split
    store_values(part_o_ptr + cell * SHAPE.DV, out, SHAPE.DV, valid, SHAPE.GV, SHAPE.M)
    meta = part_m_ptr + cell * _FIELDS
    store_sums(meta, ref, total, valid, sees_some(valid, first, limit, begin, end, window_left is not None, MULTI))
    if METER:
        meter_store(weights, values, meta, valid, spread.known, SHAPE.N)
