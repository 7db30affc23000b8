"""Chunked prefill over an INT8 prefix and the chunk's own exact keys, and the exact tail of a metered row."""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# mypy: disable-error-code="assignment,index"
# A compile-time and a run-time test cannot share one condition.
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl

from witcert_core.kernels.device.exact_tile import add_exact_values
from witcert_core.kernels.device.packed_tile import Cache, packed_queries, packed_tile
from witcert_core.kernels.device.paged import request_span
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
    weigh,
)
from witcert_core.kernels.device.tiles import (
    add_values,
    add_whole_values,
    load_groups,
    load_queries,
    load_values,
    store_values,
)
from witcert_core.kernels.host import slack

_LOG2E = tl.constexpr(1.4426950408889634)
_FIELDS = tl.constexpr(slack.META_FIELDS)


@triton.jit
def new_tile(
    q,
    k_start,
    v_start,
    live,
    D: tl.constexpr,
    NG: tl.constexpr,
    DV: tl.constexpr,
    GV: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
):
    """Products ``[N, M]`` with exact keys, the keys themselves, and values ``[N, GV, 32]``."""
    k = load_groups(k_start, live, D, NG)
    v = load_values(v_start, live, DV, GV)
    z = tl.zeros((N, M), tl.float32)
    for g in tl.static_range(NG):
        z = tl.dot(k[g], q[g], z, input_precision="ieee")
    return z, k, v


@triton.jit(do_not_specialize=["layer", "seed"])
def extend_attention(
    q_ptr,
    k_new_ptr,
    v_new_ptr,
    k_ptr,
    v_ptr,
    ks_ptr,
    vs_ptr,
    row_id_ptr,
    head_id_ptr,
    qo_indptr_ptr,
    indptr_ptr,
    indices_ptr,
    last_len_ptr,
    sink_ptr,
    alibi_ptr,
    exact_index_ptr,
    k_exact_ptr,
    v_exact_ptr,
    keep_ptr,
    channel_ptr,
    k_bypass_ptr,
    out_ptr,
    lse_ptr,
    stride_q_row,
    stride_q_head,
    stride_kn_row,
    stride_kn_head,
    stride_vn_row,
    stride_vn_head,
    stride_k_page,
    stride_k_tok,
    stride_k_head,
    stride_v_page,
    stride_v_tok,
    stride_v_head,
    stride_out_row,
    stride_out_head,
    layer,
    seed,
    sm_scale,
    new_scale,
    v_scale,
    cap,
    window_left,
    num_qo_heads,
    num_kv_heads,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    GV: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINK: tl.constexpr,
    ALIBI: tl.constexpr,
    MIXED: tl.constexpr,
    BYPASS: tl.constexpr,
    BP: tl.constexpr,
    P_DTYPE: tl.constexpr,
):
    """Grid ``(ceil(max_q_len G / M), Hkv, B)``. ``v_scale`` applies to the prefix alone: the chunk is exact."""
    NG: tl.constexpr = (D + 31) // 32
    NV: tl.constexpr = (DV + 31) // 32
    request = tl.program_id(2)
    kv_head = tl.program_id(1)
    row0 = tl.load(qo_indptr_ptr + request)
    q_len = tl.load(qo_indptr_ptr + request + 1) - row0
    pair = tl.program_id(0) * M + tl.arange(0, M)
    if tl.program_id(0) * M >= q_len * G:
        return
    query = pair // G
    valid = pair < q_len * G
    row = (row0 + query).to(tl.int64)
    head = kv_head * G + pair % G
    page0, prefix = request_span(indptr_ptr, last_len_ptr, request, PAGE)
    position = prefix + query
    first = position * 0
    if WINDOW:
        first = tl.maximum(position - window_left, 0)

    head64 = kv_head.to(tl.int64)
    q_base = q_ptr + row * stride_q_row + head * stride_q_head
    slope = tl.load(alibi_ptr + head, mask=valid, other=0.0) if ALIBI else 0.0
    ref = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    out = tl.zeros((GV, 32, M), tl.float32)

    begin = tl.min(tl.where(valid, first, prefix), 0) // N * N
    if begin < prefix:
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
        queries, _q, _lost = packed_queries(
            cache, q_base, valid, page0, begin, seed, layer, D, NG, PAGE, M, BYPASS, BP, False
        )
        for start in range(begin, prefix, N):
            token = start + tl.arange(0, N)
            live = token < prefix
            # Past the end the last token stands in: nothing is masked, and no other slot is read.
            tile = packed_tile(
                cache,
                queries,
                tl.minimum(token, prefix - 1),
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
                False,
            )
            z = tile.z * sm_scale
            visible = valid[None, :] & live[:, None] & (token[:, None] >= first[None, :])
            if SOFT_CAP:
                z = soft_cap(z, cap)
            if ALIBI:
                z += alibi_bias(slope, token, position)
            w, ref, factor, _ = weigh(z, visible, ref)
            total = total * factor + tl.sum(w, 0)
            out = add_values(out, factor, w, tile.v_step * v_scale, tile.v, M, P_DTYPE)
            if MIXED:
                if tl.max(tile.exact.to(tl.int32), 0) > 0:
                    out, _square = add_exact_values(out, w, cache, tile.exact, tile.exact_line, DV, GV, N, M, P_DTYPE)

    # From here the queries are whole: the chunk has no bypassed channels.
    q_new = load_queries(q_base, valid, keep_ptr, D, NG, False)
    last = tl.minimum((tl.program_id(0) * M + M - 1) // G + 1, q_len)
    k_base = k_new_ptr + head64 * stride_kn_head
    v_base = v_new_ptr + head64 * stride_vn_head
    for start in range(0, last, N):
        token = start + tl.arange(0, N)
        live = token < last
        source = (row0 + token).to(tl.int64)
        z, _, v = new_tile(
            q_new, k_base + source * stride_kn_row, v_base + source * stride_vn_row, live, D, NG, DV, GV, N, M
        )
        visible = valid[None, :] & live[:, None] & (token[:, None] <= query[None, :])
        visible = visible & ((prefix + token)[:, None] >= first[None, :])
        z = z * new_scale
        if SOFT_CAP:
            z = soft_cap(z, cap)
        if ALIBI:
            z += alibi_bias(slope, prefix + token, position)
        w, ref, factor, _ = weigh(z, visible, ref)
        total = total * factor + tl.sum(w, 0)
        out = add_whole_values(out, factor, w, v, M, P_DTYPE)

    if SINK:
        sink2 = tl.load(sink_ptr + head, mask=valid, other=0.0) * _LOG2E
        top = tl.maximum(ref, tl.ceil(sink2))
        factor = tl.where(ref == float("-inf"), 0.0, tl.exp2(ref - top))
        total = total * factor + tl.exp2(sink2 - top)
        ref = top
        out = out * factor[None, None, :]
    store_values(out_ptr + row * stride_out_row + head * stride_out_head, out / total[None, None, :], DV, valid, GV, M)
    tl.store(lse_ptr + row * num_qo_heads + head, ref + tl.log2(total), mask=valid)


@triton.jit
def tail_split(
    q_ptr,
    k_new_ptr,
    v_new_ptr,
    start_ptr,
    limit_ptr,
    tail_len_ptr,
    alibi_ptr,
    part_o_ptr,
    part_m_ptr,
    stride_q_row,
    stride_q_head,
    stride_kn_row,
    stride_kn_head,
    stride_vn_row,
    stride_vn_head,
    new_scale,
    v_unscale,
    cap,
    window_left,
    num_splits,
    num_qo_heads,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    GV: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SPLIT: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIBI: tl.constexpr,
    METER: tl.constexpr,
    P_DTYPE: tl.constexpr,
    DOT_ERROR: tl.constexpr,
):
    """Grid ``(rows, Hkv, tail splits)``: the new keys a metered row sees, exact but for the kernel's own
    arithmetic.

    ``v_unscale`` is ``1 / v_scale``: the merge multiplies all splits by ``v_scale``, which the chunk does not
    have.
    """
    NG: tl.constexpr = (D + 31) // 32
    r = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    begin = tl.program_id(2) * SPLIT
    tail = tl.load(tail_len_ptr + r)
    if begin >= tail:
        return
    end = tl.minimum(begin + SPLIT, tail)
    row0 = tl.load(start_ptr + r).to(tl.int64)
    split = (tl.load(limit_ptr + r) + SPLIT - 1) // SPLIT + tl.program_id(2)
    pair = tl.arange(0, M)
    valid = pair < G
    head = kv_head * G + pair
    q = load_queries(q_ptr + r * stride_q_row + head * stride_q_head, valid, q_ptr, D, NG, False)
    length_q = query_length(q, M, NG) * tl.abs(new_scale)
    slope = tl.load(alibi_ptr + head, mask=valid, other=0.0) if ALIBI else 0.0
    ref = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((N, M), tl.float32)
    out = tl.zeros((GV, 32, M), tl.float32)
    weights, values = meter_start(N, M, 1)
    head64 = kv_head.to(tl.int64)
    k_base = k_new_ptr + head64 * stride_kn_head
    v_base = v_new_ptr + head64 * stride_vn_head
    for start in range(begin, end, N):
        token = start + tl.arange(0, N)
        live = token < end
        source = row0 + token
        z, k, v = new_tile(
            q, k_base + source * stride_kn_row, v_base + source * stride_vn_row, live, D, NG, DV, GV, N, M
        )
        seen = live
        if WINDOW:
            seen = seen & (token >= tail - 1 - window_left)
        visible = valid[None, :] & seen[:, None]
        z = z * new_scale
        bias = 0.0
        if SOFT_CAP:
            z = soft_cap(z, cap)
        if ALIBI:
            bias = alibi_bias(slope, token, pair * 0 + tail - 1)
            z += bias
        w, ref, factor, gap = weigh(z, visible, ref)
        total = total * factor[None, :] + w
        if METER:
            c = tl.sqrt(squares(k, N, NG))[:, None] * length_q[None, :] * DOT_ERROR
            c += softmax_radius(gap, cap, bias, SOFT_CAP, ALIBI, tl.float32 != P_DTYPE)
            weights = meter_weights(weights, factor, w, tl.where(visible, c, 0.0))
        out = add_whole_values(out, factor, w, v, M, P_DTYPE)
        if METER:
            x = v.to(tl.float32) * v_unscale
            v_square = tl.sum(tl.sum(x * x, 2), 1)
            values = meter_values(values, factor, w, v_square, tl.zeros((N,), tl.float32), seen[:, None])
    cell = (r * num_qo_heads + head) * num_splits + split
    store_values(part_o_ptr + cell * DV, out * v_unscale, DV, valid, GV, M)
    meta = part_m_ptr + cell * _FIELDS
    first = tail - 1 - window_left
    store_sums(meta, ref, total, valid, sees_some(valid, first, tail, begin, end, WINDOW, False))
    if METER:
        meter_store(weights, values, meta, valid, length_q < float("inf"), N)
