"""The meter alone over a 16-bit, 32-bit or fp8 pool and its witness; the output stays with the engine's
kernel."""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# mypy: disable-error-code="assignment,index"
# A compile-time test and a run-time test cannot share one condition.
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl

from witcert_core.kernels.device.paged import left_out, locate, query_tile, visible_span
from witcert_core.kernels.device.radius import quantization_radius, spread_of
from witcert_core.kernels.device.running_sums import (
    alibi_bias,
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
    q_ptr,
    k_ptr,
    v_ptr,
    kw_ptr,
    vw_ptr,
    band_ptr,
    steps_ptr,
    delta_ptr,
    indptr_ptr,
    indices_ptr,
    last_len_ptr,
    request_ptr,
    position_ptr,
    limit_ptr,
    alibi_ptr,
    flag_ptr,
    part_m_ptr,
    stride_q_row,
    stride_q_head,
    stride_k_page,
    stride_k_tok,
    stride_k_head,
    stride_v_page,
    stride_v_tok,
    stride_v_head,
    sm_scale,
    cap,
    engine_constant,
    window_left,
    q_len,
    num_splits,
    num_qo_heads,
    num_kv_heads,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    GV: tl.constexpr,
    PAGE: tl.constexpr,
    B: tl.constexpr,
    BP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SPLIT: tl.constexpr,
    VALUES: tl.constexpr,
    STEPS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIBI: tl.constexpr,
    ROWS: tl.constexpr,
    MULTI: tl.constexpr,
    FLAG: tl.constexpr,
    DOT_ERROR: tl.constexpr,
):
    """Grid and rows as in ``decode_split``; only the meter's fields are written.

    Field 14 holds the largest ``omega`` of this kernel and the engine's together, without the radius.
    """
    NG: tl.constexpr = (D + 31) // 32
    if left_out(flag_ptr, FLAG):
        return
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    tile, query, valid, row, head = query_tile(q_len, kv_head, G, M)
    page0, position, limit, first, length = visible_span(
        tile,
        query,
        q_len,
        window_left,
        indptr_ptr,
        last_len_ptr,
        request_ptr,
        position_ptr,
        limit_ptr,
        PAGE,
        ROWS,
        WINDOW,
    )
    begin = split * SPLIT
    if begin >= length:
        return
    lowest = tl.min(tl.where(valid, first, length), 0)
    if WINDOW:
        if begin + SPLIT <= lowest:
            return
    end = tl.minimum(begin + SPLIT, length)

    head64 = kv_head.to(tl.int64)
    q = load_queries(q_ptr + row * stride_q_row + head * stride_q_head, valid, q_ptr, D, NG, False)
    scale = tl.abs(sm_scale)
    weight_q = band_norms(q, NG, band_ptr, D, M, BP) * (scale * _UP)
    length_q = query_length(q, M, NG) * scale
    if STEPS:
        tail = union_tail(limit - first, tl.load(delta_ptr + row, mask=valid, other=0.0))
        spread = spread_of(q, q, scale, tail, NG, 0.0, False)
    slope = tl.load(alibi_ptr + head, mask=valid, other=0.0) if ALIBI else 0.0
    band = tl.arange(0, BP)

    ref = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((N, M), tl.float32)
    omega_max = tl.zeros((N, M), tl.float32)
    weights, values = meter_start(N, M, M if MULTI else 1)
    for start in range(begin, end, N):
        token = start + tl.arange(0, N)
        live = token < end
        page, offset = locate(indices_ptr, page0, token, live, PAGE)
        line = (page * PAGE + offset) * num_kv_heads + kv_head
        k = load_groups(k_ptr + head64 * stride_k_head + page * stride_k_page + offset * stride_k_tok, live, D, NG)
        z = tl.zeros((N, M), tl.float32)
        for g in tl.static_range(NG):
            z = tl.dot(k[g].to(q_ptr.dtype.element_ty), q[g], z, input_precision="ieee")
        z = z * sm_scale
        codes = tl.load(kw_ptr + line[:, None] * B + band[None, :], mask=live[:, None] & (band < B)[None, :], other=0)
        unknown = tl.max(codes.to(tl.int32), 1) == 255
        norms = tl.where(codes == 255, 0.0, decode_norm(codes))
        c = tl.dot(norms, tl.trans(weight_q), input_precision="ieee")
        if STEPS:
            steps, no_scale = load_scales(steps_ptr, line, live, NG)
            c += quantization_radius(spread, steps, kw_ptr, line, live, N, M, NG, False)
            unknown = unknown | no_scale

        visible = valid[None, :] & live[:, None]
        seen = live[:, None]
        bias = 0.0
        if WINDOW:
            visible = visible & (token[:, None] >= first[None, :])
            seen = (live & (token >= lowest))[:, None]
        if MULTI:
            visible = visible & (token[:, None] < limit[None, :])
            seen = visible
        if SOFT_CAP:
            z = soft_cap(z, cap)
        if ALIBI:
            bias = alibi_bias(slope, token, position)
            z += bias
        w, ref, factor, gap = weigh(z, visible, ref)
        total = total * factor[None, :] + w

        dot = tl.sqrt(squares(k, N, NG))[:, None] * length_q[None, :] * DOT_ERROR
        own = dot + softmax_radius(gap, cap, bias, SOFT_CAP, ALIBI, False)
        # The engine's kernel rounds the same way, but for what it may do far below the maximum.
        theirs = dot + softmax_radius(tl.zeros((N, M), tl.float32), cap, bias, SOFT_CAP, ALIBI, False) + engine_constant
        both = tl.where(visible, own + theirs, 0.0)
        omega_max = tl.where(both > omega_max, both, omega_max)
        # A NaN must not be lost by the comparison: it makes the term infinite.
        omega_max = tl.where(both == both, omega_max, float("inf"))
        # A NaN of the query's must not be lost by a comparison either.
        c = tl.where(unknown[:, None] | (c != c), float("inf"), c + own)
        c = tl.where(visible, c, 0.0)
        weights = meter_weights(weights, factor, w, c)

        v_square = tl.zeros((N,), tl.float32)
        rho = tl.zeros((N,), tl.float32) + float("inf")
        if VALUES:
            start_v = v_ptr + head64 * stride_v_head + page * stride_v_page + offset * stride_v_tok
            v = load_values(start_v, live, DV, GV).to(tl.float32)
            v_square = tl.sum(tl.sum(v * v, 2), 1)
            rho = decode_norm(tl.load(vw_ptr + line, mask=live, other=0))
        values = meter_values(values, factor, w, v_square, tl.where(live, rho, 0.0), seen)

    meta = part_m_ptr + ((row * num_qo_heads + head) * num_splits + split) * _FIELDS
    store_sums(meta, ref, total, valid, sees_some(valid, first, limit, begin, end, WINDOW, MULTI))
    tl.store(meta + 14, tl.max(omega_max, 0), mask=valid)
    meter_store(weights, values, meta, valid, length_q < float("inf"), N)
