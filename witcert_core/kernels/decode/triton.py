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
from witcert_core.kernels.device.exact_tile import add_exact_values
from witcert_core.kernels.device.packed_tile import Cache, packed_queries, packed_tile
from witcert_core.kernels.device.paged import left_out, query_tile, visible_span
from witcert_core.kernels.device.radius import quantization_radius, spread_of
from witcert_core.kernels.device.running_sums import (
    alibi_bias,
    bias_radius,
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


@triton.jit(do_not_specialize=["layer", "seed"])
def decode_split(
    q_ptr,
    k_ptr,
    v_ptr,
    ks_ptr,
    vs_ptr,
    kw_ptr,
    row_id_ptr,
    head_id_ptr,
    indptr_ptr,
    indices_ptr,
    last_len_ptr,
    request_ptr,
    position_ptr,
    limit_ptr,
    delta_ptr,
    alibi_ptr,
    flag_ptr,
    exact_index_ptr,
    k_exact_ptr,
    v_exact_ptr,
    keep_ptr,
    channel_ptr,
    k_bypass_ptr,
    part_o_ptr,
    part_m_ptr,
    stride_q_row,
    stride_q_head,
    stride_k_page,
    stride_k_tok,
    stride_k_head,
    stride_v_page,
    stride_v_tok,
    stride_v_head,
    layer,
    seed,
    sm_scale,
    cap,
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
    M: tl.constexpr,
    N: tl.constexpr,
    SPLIT: tl.constexpr,
    METER: tl.constexpr,
    WITNESS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIBI: tl.constexpr,
    ROWS: tl.constexpr,
    MULTI: tl.constexpr,
    FLAG: tl.constexpr,
    MIXED: tl.constexpr,
    BYPASS: tl.constexpr,
    BP: tl.constexpr,
    DIGITS: tl.constexpr,
    P_DTYPE: tl.constexpr,
    DOT_ERROR: tl.constexpr,
    EXACT_DOT_ERROR: tl.constexpr,
    BYPASS_DOT_ERROR: tl.constexpr,
):
    """Grid ``(requests * m_tiles, Hkv, splits)``; rows as in ``visible_span``, ``MULTI``: ``q_len > 1``.

    ``ks_ptr`` as in ``load_scales``. With ``BYPASS`` channels a head: ``keep_ptr [Hkv, D]`` is 0 at them,
    ``channel_ptr [Hkv, BYPASS]`` lists them, ``k_bypass_ptr`` holds their keys.
    """
    NG: tl.constexpr = (D + 31) // 32
    NV: tl.constexpr = (DV + 31) // 32
    if left_out(flag_ptr, FLAG):
        return
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    request_tile, query, valid, row, head = query_tile(q_len, kv_head, G, M)
    page0, position, limit, first, length = visible_span(
        request_tile,
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
    q_base = q_ptr + row * stride_q_row + head * stride_q_head
    cache = Cache(
        k_ptr + head64 * stride_k_head,
        stride_k_page,
        stride_k_tok,
        v_ptr + head64 * stride_v_head,
        stride_v_page,
        stride_v_tok,
        ks_ptr,
        vs_ptr,
        row_id_ptr,
        indices_ptr,
        exact_index_ptr,
        k_exact_ptr,
        v_exact_ptr,
        keep_ptr + head64 * D,
        channel_ptr + head64 * BYPASS,
        k_bypass_ptr,
        kv_head,
        num_kv_heads,
        tl.load(head_id_ptr + kv_head),
    )
    queries, q, lost = packed_queries(
        cache, q_base, valid, page0, begin, seed, layer, D, NG, PAGE, M, BYPASS, BP, DIGITS
    )
    scale = tl.abs(sm_scale)
    whole_length = query_length(q, M, NG) * scale if MIXED else 0.0
    bypass_length = query_length((queries.bypass,), M, 1) * scale if BYPASS > 0 else 0.0
    if MIXED and BYPASS > 0:
        # Exact keys meet the whole query.
        whole_length += bypass_length
    if METER:
        tail = union_tail(limit - first, tl.load(delta_ptr + row, mask=valid, other=0.0))
        spread = spread_of(q, lost, scale, tail, NG, DOT_ERROR, DIGITS)
    slope = tl.load(alibi_ptr + head, mask=valid, other=0.0) if ALIBI else 0.0

    ref = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((N, M), tl.float32)
    out = tl.zeros((GV, 32, M if M > 8 else 8), tl.float32)
    weights, values = meter_start(N, M, M if MULTI else 1)
    for start in range(begin, end, N):
        token = start + tl.arange(0, N)
        live = token < end
        # Past the end the last token stands in: nothing is masked, and no other slot is read.
        tile = packed_tile(
            cache,
            queries,
            tl.minimum(token, end - 1),
            tl.full((N,), True, tl.int1),
            page0,
            seed,
            layer,
            D,
            NG,
            DV,
            NV,
            GV,
            PAGE,
            N,
            M,
            MIXED,
            BYPASS,
            BP,
            DIGITS,
        )
        z = tile.z * sm_scale
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
        if METER:
            c = quantization_radius(spread, tile.k_step, kw_ptr, tile.line, live, N, M, NG, WITNESS)
            # Once a token what all its weights have: infinite where its radius is unknown, 0 where it is not there.
            fixed = fixed_radius(cap, SOFT_CAP, tl.float32 != P_DTYPE)
            c += tl.where(live, tl.where(tile.unknown, float("inf"), fixed), 0.0)[:, None]
            if tl.float32 == P_DTYPE:
                c += far_radius(gap)
            if ALIBI:
                c += bias_radius(bias)
            if MIXED:
                c += tl.sqrt(tile.exact_square)[:, None] * whole_length[None, :] * EXACT_DOT_ERROR
            if BYPASS > 0:
                c += tl.sqrt(tile.bypass_square)[:, None] * bypass_length[None, :] * BYPASS_DOT_ERROR
            weights = meter_weights(weights, factor, w, tl.where(visible, c, 0.0))

        out = add_values(out, factor, w, tile.v_step, tile.v, M, P_DTYPE)
        exact_v_square = tl.zeros((N,), tl.float32)
        if MIXED:
            if tl.max(tile.exact.to(tl.int32), 0) > 0:
                out, exact_v_square = add_exact_values(
                    out, w, cache, tile.exact, tile.exact_line, DV, GV, N, M, P_DTYPE
                )
        if METER:
            v_square = tl.sum(tile.v_step * tile.v_step * code_squares(tile.v_at, DV, GV), 1) + exact_v_square
            # Half a step in each channel, with the 2^-13 that dequantization in fp32 may add.
            channels = tl.minimum(tl.maximum(DV - 32 * tl.arange(0, GV), 0), 32).to(tl.float32)
            steps = tl.where(tile.v_unknown, float("inf"), tile.v_step * tile.v_step)
            rho = tl.sqrt(tl.sum(tl.where(channels > 0.0, channels, 1.0)[None, :] * steps, 1))
            rho = rho * (0.5 * (1.0 + 2.0**-13) * _UP)
            values = meter_values(values, factor, w, v_square, tl.where(live, rho, 0.0), seen)

    cell = (row * num_qo_heads + head) * num_splits + split
    store_values(part_o_ptr + cell * DV, out, DV, valid, GV, M)
    meta = part_m_ptr + cell * _FIELDS
    store_sums(meta, ref, total, valid, sees_some(valid, first, limit, begin, end, WINDOW, MULTI))
    if METER:
        meter_store(weights, values, meta, valid, spread.known, N)
