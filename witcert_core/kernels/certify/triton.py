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

from witcert_core.kernels.common import slack
from witcert_core.kernels.common.device import (
    meter_start,
    meter_store,
    meter_values,
    meter_weights,
    next_reference,
    soft_cap,
)
from witcert_core.kernels.common.tiles import load_groups

_SOFTMAX = tl.constexpr(slack.SOFTMAX)
_SOFTCAP = tl.constexpr(slack.SOFTCAP)
_BIAS = tl.constexpr(slack.BIAS)
_FAR = tl.constexpr(slack.FAR)
_UP = tl.constexpr(slack.RADIUS_UP)
_LOG2E = tl.constexpr(1.4426950408889634)
_FIELDS = tl.constexpr(slack.META_FIELDS)


@triton.jit
def decode_norm(codes):
    """What uint8 codes stand for, rounded up; +inf for 255."""
    code = codes.to(tl.float32)
    level = tl.exp2((code - 160.0) * 0.125) * (1.0 + 2.0**-20)
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
        single = q[g].to(tl.float32)
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
    PAGE: tl.constexpr,
    B: tl.constexpr,
    BP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SPLIT: tl.constexpr,
    VALUES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIBI: tl.constexpr,
    ROWS: tl.constexpr,
    FLAG: tl.constexpr,
    DOT_ERROR: tl.constexpr,
):
    """Grid and rows as in ``decode_split``; only the meter's fields are written.

    Field 14 holds the largest ``omega`` of this kernel and the engine's together, without the radius.
    """
    NG: tl.constexpr = (D + 31) // 32
    NV: tl.constexpr = (DV + 31) // 32
    if FLAG == 1:
        if tl.load(flag_ptr) == 0:
            return
    m_tiles = (q_len * G + M - 1) // M
    tile = tl.program_id(0) // m_tiles
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    pair = (tl.program_id(0) % m_tiles) * M + tl.arange(0, M)
    query = pair // G
    valid = pair < q_len * G
    row = (tile * q_len + query).to(tl.int64)
    head = kv_head * G + pair % G
    request = tile
    if ROWS:
        request = tl.load(request_ptr + tile)
    page0 = tl.load(indptr_ptr + request)
    pages = tl.load(indptr_ptr + request + 1) - page0
    length = tl.where(pages > 0, (pages - 1) * PAGE + tl.load(last_len_ptr + request), 0)
    begin = split * SPLIT
    position = length - q_len + query
    limit = position + 1
    if ROWS:
        position = tl.load(position_ptr + tile) + query * 0
        limit = tl.load(limit_ptr + tile) + query * 0
        length = tl.minimum(length, tl.load(limit_ptr + tile))
    if begin >= length:
        return
    first = position * 0
    if WINDOW:
        first = tl.maximum(position - window_left, 0)
        if begin + SPLIT <= tl.min(tl.where(valid, first, length), 0):
            return
    end = tl.minimum(begin + SPLIT, length)

    head64 = kv_head.to(tl.int64)
    q = load_groups(q_ptr + head[:, None] * stride_q_head, row, stride_q_row, valid, 0.0, D, NG)
    scale = tl.abs(sm_scale)
    weight_q = band_norms(q, NG, band_ptr, D, M, BP) * (scale * _UP)
    length_q = tl.zeros((M,), tl.float32)
    for g in tl.static_range(NG):
        single = q[g].to(tl.float32)
        length_q += tl.sum(single * single, 1)
    length_q = (tl.sqrt(length_q) + 3.469446951953614e-18) * (scale * _UP)
    slope = tl.load(alibi_ptr + head, mask=valid, other=0.0) if ALIBI else 0.0
    band = tl.arange(0, BP)

    ref = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((N, M), tl.float32)
    omega_max = tl.zeros((N, M), tl.float32)
    weights, values = meter_start(N, M)
    for start in range(begin, end, N):
        token = start + tl.arange(0, N)
        live = token < end
        page = tl.load(indices_ptr + page0 + token // PAGE, mask=live, other=0).to(tl.int64)
        offset = token % PAGE
        line = (page * PAGE + offset) * num_kv_heads + kv_head
        k = load_groups(
            k_ptr + head64 * stride_k_head + page[:, None] * stride_k_page,
            offset,
            stride_k_tok,
            live,
            0.0,
            D,
            NG,
        )
        z = tl.zeros((N, M), tl.float32)
        k_square = tl.zeros((N,), tl.float32)
        for g in tl.static_range(NG):
            z = tl.dot(k[g].to(q_ptr.dtype.element_ty), tl.trans(q[g]), z, input_precision="ieee")
            part = k[g].to(tl.float32)
            k_square += tl.sum(part * part, 1)
        z = z * sm_scale
        codes = tl.load(kw_ptr + line[:, None] * B + band[None, :], mask=live[:, None] & (band < B)[None, :], other=0)
        unknown = tl.max(codes.to(tl.int32), 1) == 255
        norms = tl.where(codes == 255, 0.0, decode_norm(codes))
        c = tl.dot(norms, tl.trans(weight_q), input_precision="ieee")

        visible = valid[None, :] & live[:, None] & (token[:, None] < limit[None, :])
        if WINDOW:
            visible = visible & (token[:, None] >= first[None, :])
        if SOFT_CAP:
            z = soft_cap(z, cap)
        extra = tl.zeros((N, M), tl.float32) + _SOFTMAX
        if SOFT_CAP:
            extra += cap * _SOFTCAP
        if ALIBI:
            bias = slope[None, :] * (token[:, None] - position[None, :]).to(tl.float32)
            z += bias
            extra += tl.abs(bias) * _BIAS
        z2 = tl.where(visible, z * _LOG2E, float("-inf"))
        ref, safe, factor = next_reference(z2, ref)
        gap = z2 - safe[None, :]
        w = tl.exp2(gap)
        total = total * factor[None, :] + w

        dot = tl.sqrt(k_square)[:, None] * length_q[None, :] * DOT_ERROR
        own = dot + extra + tl.where(gap < -150.0, 150.0, tl.abs(gap)) * _FAR
        both = tl.where(visible, own + dot + extra + engine_constant, 0.0)
        omega_max = tl.where(both > omega_max, both, omega_max)
        # A NaN must not be lost by the comparison: it makes the term infinite.
        omega_max = tl.where(both == both, omega_max, float("inf"))
        c = tl.where(unknown[:, None], float("inf"), c + own)
        c = tl.where(visible, c, 0.0)
        weights = meter_weights(weights, factor, w, c)

        v_square = tl.zeros((N,), tl.float32)
        rho = tl.zeros((N,), tl.float32) + float("inf")
        if VALUES:
            v = load_groups(
                v_ptr + head64 * stride_v_head + page[:, None] * stride_v_page,
                offset,
                stride_v_tok,
                live,
                0.0,
                DV,
                NV,
            )
            for g in tl.static_range(NV):
                part = v[g].to(tl.float32)
                v_square += tl.sum(part * part, 1)
            rho = decode_norm(tl.load(vw_ptr + line, mask=live, other=0))
        rho = tl.where(live, rho, 0.0)
        values = meter_values(values, factor, w, v_square, rho, visible)

    meta = part_m_ptr + ((row * num_qo_heads + head) * num_splits + split) * _FIELDS
    tl.store(meta, ref, mask=valid)
    tl.store(meta + 1, tl.sum(total, 0), mask=valid)
    tl.store(meta + 14, tl.max(omega_max, 0), mask=valid)
    meter_store(weights, values, meta, valid, N)
