"""Chunked prefill over an INT8 prefix and the chunk's own exact keys, and the exact tail of a metered row."""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# mypy: disable-error-code="assignment,index"
# Triton has no starred tuples, and a compile-time and a run-time test cannot share one condition.
# ruff: noqa: RUF005, SIM102, SIM300, B007, RUF059

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
from witcert_core.kernels.common.tiles import load_groups, load_words, row_terms, tile_terms, unpack

_SOFTMAX = tl.constexpr(slack.SOFTMAX)
_SOFTCAP = tl.constexpr(slack.SOFTCAP)
_FAR = tl.constexpr(slack.FAR)
_CAST = tl.constexpr(slack.CAST)
_UP = tl.constexpr(slack.RADIUS_UP)
_LOG2E = tl.constexpr(1.4426950408889634)
_FIELDS = tl.constexpr(slack.META_FIELDS)


@triton.jit
def mask_and_weigh(z, cap, ref, visible, SOFT_CAP: tl.constexpr):
    """Base-2 weights ``[N, M]`` of one tile, with the new reference, the factor of the old sums, and the
    gap."""
    if SOFT_CAP:
        z = soft_cap(z, cap)
    z2 = tl.where(visible, z * _LOG2E, float("-inf"))
    ref, safe, factor = next_reference(z2, ref)
    gap = z2 - safe[None, :]
    return tl.exp2(gap), ref, factor, gap


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
    PAGE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINK: tl.constexpr,
    P_DTYPE: tl.constexpr,
):
    """Grid ``(ceil(max_q_len G / M), Hkv, B)``. ``v_scale`` applies to the prefix alone: the chunk is
    exact."""
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
    page0 = tl.load(indptr_ptr + request)
    pages = tl.load(indptr_ptr + request + 1) - page0
    prefix = tl.where(pages > 0, (pages - 1) * PAGE + tl.load(last_len_ptr + request), 0)
    position = prefix + query
    first = position * 0
    if WINDOW:
        first = tl.maximum(position - window_left, 0)

    head64 = kv_head.to(tl.int64)
    q_base = q_ptr + head[:, None] * stride_q_head
    q = load_groups(q_base, row, stride_q_row, valid, 0.0, D, NG)
    global_head = tl.load(head_id_ptr + kv_head)
    ref = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    out = ()
    for g in tl.static_range(NV):
        out = out + (tl.zeros((M, 32), tl.float32),)
    current = tl.zeros((), tl.int32)
    kappa = ()
    for g in tl.static_range(NG):
        kappa = kappa + (tl.zeros((M,), tl.float32),)

    begin = tl.min(tl.where(valid, first, prefix), 0) // N * N
    for start in range(begin, prefix, N):
        token = start + tl.arange(0, N)
        live = token < prefix
        page = tl.load(indices_ptr + page0 + token // PAGE, mask=live, other=0).to(tl.int64)
        offset = token % PAGE
        slot = page * PAGE + offset
        row_id = tl.load(row_id_ptr + slot, mask=live, other=0)
        line = slot * num_kv_heads + kv_head
        k_base = k_ptr + head64 * stride_k_head + page[:, None] * stride_k_page
        v_base = v_ptr + head64 * stride_v_head + page[:, None] * stride_v_page
        k = load_words(k_base, offset, stride_k_tok, live, D // 4, NG)
        v = load_words(v_base, offset, stride_v_tok, live, DV // 4, NV)
        leader = tl.max(tl.where(live, row_id, -2147483648), 0)
        shared = tl.min(tl.where(live, row_id, 2147483647), 0) == leader
        if shared:
            if leader != current:
                current = leader
                kappa = row_terms(q_base, row, stride_q_row, valid, seed, leader, layer, global_head, M, D, NG)
        z = tl.zeros((N, M), tl.float32)
        undithered = tl.zeros((N, M), tl.float32)
        for g in tl.static_range(NG):
            s_raw = tl.load(ks_ptr + line * NG + g, mask=live, other=0.0).to(tl.float32)
            s = tl.where((s_raw >= 0.0) & (s_raw < float("inf")), s_raw, 0.0)
            dot = tl.dot(unpack(k[g], N).to(q_ptr.dtype.element_ty), tl.trans(q[g]), input_precision="ieee")
            z += dot * s[:, None]
            if shared:
                undithered += kappa[g][None, :] * s[:, None]
        if shared == 0:
            undithered = tile_terms(
                q_base,
                row,
                stride_q_row,
                valid,
                ks_ptr + line * NG,
                row_id,
                live,
                seed,
                layer,
                global_head,
                N,
                M,
                D,
                NG,
            )
        visible = valid[None, :] & live[:, None] & (token[:, None] >= first[None, :])
        w, ref, factor, gap = mask_and_weigh((z - undithered) * sm_scale, cap, ref, visible, SOFT_CAP)
        total = total * factor + tl.sum(w, 0)
        new_out = ()
        for g in tl.static_range(NV):
            s_raw = tl.load(vs_ptr + line * NV + g, mask=live, other=0.0).to(tl.float32)
            s = tl.where((s_raw >= 0.0) & (s_raw < float("inf")), s_raw, 0.0) * v_scale
            ws = (w * s[:, None]).to(P_DTYPE)
            code = unpack(v[g], N).to(P_DTYPE)
            new_out = new_out + (tl.dot(tl.trans(ws), code, out[g] * factor[:, None], input_precision="ieee"),)
        out = new_out

    last = tl.minimum((tl.program_id(0) * M + M - 1) // G + 1, q_len)
    for start in range(0, last, N):
        token = start + tl.arange(0, N)
        live = token < last
        source = (row0 + token).to(tl.int64)
        k = load_groups(k_new_ptr + head64 * stride_kn_head, source, stride_kn_row, live, 0.0, D, NG)
        v = load_groups(v_new_ptr + head64 * stride_vn_head, source, stride_vn_row, live, 0.0, DV, NV)
        z = tl.zeros((N, M), tl.float32)
        for g in tl.static_range(NG):
            z = tl.dot(k[g], tl.trans(q[g]), z, input_precision="ieee")
        visible = valid[None, :] & live[:, None] & (token[:, None] <= query[None, :])
        visible = visible & ((prefix + token)[:, None] >= first[None, :])
        w, ref, factor, gap = mask_and_weigh(z * new_scale, cap, ref, visible, SOFT_CAP)
        total = total * factor + tl.sum(w, 0)
        new_out = ()
        for g in tl.static_range(NV):
            acc = tl.dot(tl.trans(w.to(P_DTYPE)), v[g].to(P_DTYPE), out[g] * factor[:, None], input_precision="ieee")
            new_out = new_out + (acc,)
        out = new_out

    if SINK:
        sink2 = tl.load(sink_ptr + head, mask=valid, other=0.0) * _LOG2E
        top = tl.maximum(ref, tl.ceil(sink2))
        factor = tl.where(ref == float("-inf"), 0.0, tl.exp2(ref - top))
        total = total * factor + tl.exp2(sink2 - top)
        ref = top
        new_out = ()
        for g in tl.static_range(NV):
            new_out = new_out + (out[g] * factor[:, None],)
        out = new_out
    for g in tl.static_range(NV):
        channel = g * 32 + tl.arange(0, 32)
        keep = valid[:, None] & (channel < DV)[None, :]
        value = (out[g] / total[:, None]).to(out_ptr.dtype.element_ty)
        target = row[:, None] * stride_out_row + head[:, None] * stride_out_head + channel[None, :]
        tl.store(out_ptr + target, value, mask=keep)
    tl.store(lse_ptr + row * num_qo_heads + head, ref + tl.log2(total), mask=valid)


@triton.jit
def tail_split(
    q_ptr,
    k_new_ptr,
    v_new_ptr,
    start_ptr,
    limit_ptr,
    tail_len_ptr,
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
    M: tl.constexpr,
    N: tl.constexpr,
    SPLIT: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
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
    NV: tl.constexpr = (DV + 31) // 32
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
    q = load_groups(q_ptr + head[:, None] * stride_q_head, r + pair * 0, stride_q_row, valid, 0.0, D, NG)
    length_q = tl.zeros((M,), tl.float32)
    for g in tl.static_range(NG):
        single = q[g].to(tl.float32)
        length_q += tl.sum(single * single, 1)
    length_q = (tl.sqrt(length_q) + 3.469446951953614e-18) * (tl.abs(new_scale) * _UP)
    ref = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((N, M), tl.float32)
    out = ()
    for g in tl.static_range(NV):
        out = out + (tl.zeros((M, 32), tl.float32),)
    weights, values = meter_start(N, M)
    head64 = kv_head.to(tl.int64)
    for start in range(begin, end, N):
        token = start + tl.arange(0, N)
        live = token < end
        k = load_groups(k_new_ptr + head64 * stride_kn_head, row0 + token, stride_kn_row, live, 0.0, D, NG)
        v = load_groups(v_new_ptr + head64 * stride_vn_head, row0 + token, stride_vn_row, live, 0.0, DV, NV)
        z = tl.zeros((N, M), tl.float32)
        k_square = tl.zeros((N,), tl.float32)
        for g in tl.static_range(NG):
            z = tl.dot(k[g], tl.trans(q[g]), z, input_precision="ieee")
            if METER:
                part = k[g].to(tl.float32)
                k_square += tl.sum(part * part, 1)
        visible = valid[None, :] & live[:, None]
        if WINDOW:
            visible = visible & (token >= tail - 1 - window_left)[:, None]
        w, ref, factor, gap = mask_and_weigh(z * new_scale, cap, ref, visible, SOFT_CAP)
        total = total * factor[None, :] + w
        if METER:
            c = tl.sqrt(k_square)[:, None] * length_q[None, :] * DOT_ERROR + _SOFTMAX
            c += tl.where(gap < -150.0, 150.0, tl.abs(gap)) * _FAR
            if SOFT_CAP:
                c += cap * _SOFTCAP
            if P_DTYPE != tl.float32:
                c += _CAST
            weights = meter_weights(weights, factor, w, tl.where(visible, c, 0.0))
        v_square = tl.zeros((N,), tl.float32)
        new_out = ()
        for g in tl.static_range(NV):
            part = v[g].to(tl.float32) * v_unscale
            if METER:
                v_square += tl.sum(part * part, 1)
            scaled = (w * v_unscale).to(P_DTYPE)
            acc = tl.dot(tl.trans(scaled), v[g].to(P_DTYPE), out[g] * factor[:, None], input_precision="ieee")
            new_out = new_out + (acc,)
        out = new_out
        if METER:
            values = meter_values(values, factor, w, v_square, tl.zeros((N,), tl.float32), visible)
    cell = (r * num_qo_heads + head) * num_splits + split
    for g in tl.static_range(NV):
        channel = g * 32 + tl.arange(0, 32)
        keep = valid[:, None] & (channel < DV)[None, :]
        tl.store(part_o_ptr + cell[:, None] * DV + channel[None, :], out[g], mask=keep)
    meta = part_m_ptr + cell * _FIELDS
    tl.store(meta, ref, mask=valid)
    tl.store(meta + 1, tl.sum(total, 0), mask=valid)
    if METER:
        meter_store(weights, values, meta, valid, N)
