"""The meter alone over a 16-bit, 32-bit or fp8 pool and its witness; the output stays with the engine's kernel."""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# mypy: disable-error-code="assignment,index"
# A compile-time test and a run-time test cannot share one condition.
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl

from witcert_core.kernels.device.paged import locate, query_tile, visible_span
from witcert_core.kernels.device.radius import dot_error, quantization_radius, spread_of
from witcert_core.kernels.device.running_sums import (
    meter_start,
    meter_store,
    meter_values,
    meter_weights,
    query_length,
    sees_some,
    soft_cap,
    softmax_radius,
    squares,
    store_sums,
    union_tail,
    weigh,
)
from witcert_core.kernels.device.tiles import load_groups, load_queries, load_scales, load_values
from witcert_core.kernels.host import slack

_FIELDS = tl.constexpr(slack.META_FIELDS)
_SPLIT = tl.constexpr(slack.SPLIT_TOKENS)
_UP = tl.constexpr(slack.RADIUS_UP)


@triton.jit
def decode_norm(codes):
    """What uint8 codes stand for, rounded up; +inf for 255."""
    code = codes.to(tl.float32)
    exponent = (code - 160.0) * 0.125
    exponent = tl.where(code > 238.0, 9.75 + (code - 238.0) * 2.0, exponent)
    exponent = tl.where(code > 246.0, 25.75 + (code - 246.0) * 12.75, exponent)
    level = tl.exp2(exponent) * (1.0 + 2.0**-20)
    level = tl.where(code == 0.0, 0.0, level)
    return tl.where(code == 255.0, float("inf"), level)


@triton.jit
def band_norms(q, NG: tl.constexpr, band_ptr, D: tl.constexpr, M: tl.constexpr, BP: tl.constexpr):
    """``||q_b||`` rounded up ``[M, BP]``; ``2^-58`` stands for channels whose square underflows."""
    column = tl.arange(0, BP)
    square = tl.zeros((M, BP), tl.float32)
    for g in tl.static_range(NG):
        channel = g * 32 + tl.arange(0, 32)
        band = tl.load(band_ptr + channel, mask=channel < D, other=-1)
        single = tl.trans(q[g]).to(tl.float32)
        member = (band[:, None] == column[None, :]).to(tl.float32)
        square += tl.dot(single * single, member, input_precision="ieee")
    return tl.sqrt(square) * (1.0 + 2.0**-18) + 3.469446951953614e-18


@triton.jit
def certify_split(
    q,
    k_pool,
    v_pool,
    witness_ptr,
    value_witness_ptr,
    band_ptr,
    steps_ptr,
    delta_ptr,
    pages,
    rows,
    part_m_ptr,
    sm_scale,
    cap,
    engine_constant,
    window_left,
    num_splits,
    num_qo_heads,
    num_kv_heads,
    SHAPE: tl.constexpr,
    B: tl.constexpr,
    BP: tl.constexpr,
):
    """Grid ``(R * m_tiles, Hkv, splits)``, rows one by one; only the meter's fields are written.

    ``q``: :class:`Heads`; ``k_pool``, ``v_pool``: :class:`Slots`. Without ``value_witness_ptr`` values are unknown and
    not read; without ``steps_ptr`` (as :func:`load_scales` reads them) keys are not dithered. ``B`` bands, ``BP`` in a
    tile. Field 14 holds the largest ``omega`` of this kernel and the engine's together, without the radius.
    """
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    number, query, valid, row, head = query_tile(1, kv_head, SHAPE.G, SHAPE.M)
    page0, limit, first, length = visible_span(number, query, 1, window_left, pages, rows, SHAPE.PAGE)
    begin = split * _SPLIT
    if begin >= length:
        return
    lowest = tl.min(tl.where(valid, first, length), 0)
    if window_left is not None:
        if begin + _SPLIT <= lowest:
            return
    end = tl.minimum(begin + _SPLIT, length)

    head64 = kv_head.to(tl.int64)
    k_head = k_pool.ptr + head64 * k_pool.head
    queries = load_queries(q.ptr + row * q.row + head * q.head, valid, None, SHAPE.D)
    scale = tl.abs(sm_scale)
    weight_q = band_norms(queries, SHAPE.NG, band_ptr, SHAPE.D, SHAPE.M, BP) * (scale * _UP)
    length_q = query_length(queries, SHAPE.M, SHAPE.NG) * scale
    if steps_ptr is not None:
        tail = union_tail(limit - first, tl.load(delta_ptr + row, mask=valid, other=0.0))
        spread = spread_of(queries, queries, scale, tail, SHAPE.NG, 0.0, False)
    band = tl.arange(0, BP)

    ref = tl.full((SHAPE.M,), float("-inf"), tl.float32)
    total = tl.zeros((SHAPE.N, SHAPE.M), tl.float32)
    omega_max = tl.zeros((SHAPE.N, SHAPE.M), tl.float32)
    weights, values = meter_start(SHAPE.N, SHAPE.M, 1)
    for start in range(begin, end, SHAPE.N):
        token = start + tl.arange(0, SHAPE.N)
        live = token < end
        page, offset = locate(pages.indices, page0, token, live, SHAPE.PAGE)
        line = (page * SHAPE.PAGE + offset) * num_kv_heads + kv_head
        k = load_groups(k_head + page * k_pool.page + offset * k_pool.token, live, SHAPE.D)
        z = tl.zeros((SHAPE.N, SHAPE.M), tl.float32)
        for g in tl.static_range(SHAPE.NG):
            z = tl.dot(k[g].to(q.ptr.dtype.element_ty), queries[g], z, input_precision="ieee")
        keep = live[:, None] & (band < B)[None, :]
        codes = tl.load(witness_ptr + line[:, None] * B + band[None, :], mask=keep, other=0)
        unknown = tl.max(codes.to(tl.int32), 1) == 255
        norms = tl.where(codes == 255, 0.0, decode_norm(codes))
        c = tl.dot(norms, tl.trans(weight_q), input_precision="ieee")
        if steps_ptr is not None:
            steps, no_scale = load_scales(steps_ptr, line, live, SHAPE.NG)
            c += quantization_radius(spread, steps, None, line, live, SHAPE.N, SHAPE.M, SHAPE.NG)
            unknown = unknown | no_scale

        visible = valid[None, :] & live[:, None]
        seen = live[:, None]
        if window_left is not None:
            visible = visible & (token[:, None] >= first[None, :])
            seen = (live & (token >= lowest))[:, None]
        w, ref, factor, gap = weigh(soft_cap(z * sm_scale, cap), visible, ref)
        total = total * factor[None, :] + w

        dot = tl.sqrt(squares(k, SHAPE.N, SHAPE.NG))[:, None] * length_q[None, :] * dot_error(SHAPE.D)
        own = dot + softmax_radius(gap, cap, False)
        # The engine's kernel rounds the same way, but for what it may do far below the maximum.
        theirs = dot + softmax_radius(tl.zeros((SHAPE.N, SHAPE.M), tl.float32), cap, False) + engine_constant
        both = tl.where(visible, own + theirs, 0.0)
        omega_max = tl.where(both > omega_max, both, omega_max)
        # A NaN must not be lost by the comparison: it makes the term infinite.
        omega_max = tl.where(both == both, omega_max, float("inf"))
        # A NaN of the query's must not be lost by a comparison either.
        c = tl.where(unknown[:, None] | (c != c), float("inf"), c + own)
        weights = meter_weights(weights, factor, w, tl.where(visible, c, 0.0))

        v_square = tl.zeros((SHAPE.N,), tl.float32)
        rho = tl.zeros((SHAPE.N,), tl.float32) + float("inf")
        if value_witness_ptr is not None:
            at = v_pool.ptr + head64 * v_pool.head + page * v_pool.page + offset * v_pool.token
            v = load_values(at, live, SHAPE.DV, SHAPE.GV).to(tl.float32)
            v_square = tl.sum(tl.sum(v * v, 2), 1)
            rho = decode_norm(tl.load(value_witness_ptr + line, mask=live, other=0))
        values = meter_values(values, factor, w, v_square, tl.where(live, rho, 0.0), seen)

    meta = part_m_ptr + ((row * num_qo_heads + head) * num_splits + split) * _FIELDS
    store_sums(meta, ref, total, valid, sees_some(valid, first, limit, begin, end, window_left is not None, False))
    tl.store(meta + 14, tl.max(omega_max, 0), mask=valid)
    meter_store(weights, values, meta, valid, length_q < float("inf"), SHAPE.N)
