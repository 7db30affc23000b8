"""Split-K decode attention over INT8 pages, with the meter's sums in the same pass.

One program reads one split (512 tokens) of one request and KV head for a tile of 16 (query row, head) pairs.
Codes are exact in 16 bit, so ``<q_g, code_g>`` goes through tensor cores group by group and only the scales
are applied in fp32: ``z = sum_g s_g (<q_g, code_g> - <q_g, u_g>)``. Where all tokens of a tile share a dither
row, ``<q_g, u_g>`` is computed once for the row; elsewhere the rows are drawn. V is rounded to nearest,
without dither: its bound is deterministic and the same, and nothing is drawn for it.
"""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# mypy: disable-error-code="assignment,index"
# Triton has no starred tuples, and a compile-time and a run-time test cannot share one condition.
# ruff: noqa: RUF005, SIM102, SIM300, B007

from __future__ import annotations

import triton
import triton.language as tl

from witcert_core.kernels.common import slack
from witcert_core.kernels.common.device import (
    dither_radius,
    meter_start,
    meter_store,
    meter_values,
    meter_weights,
    next_reference,
    soft_cap,
    union_tail,
)
from witcert_core.kernels.common.tiles import load_groups, load_words, row_terms, tile_terms, unpack

_ARITHMETIC = tl.constexpr(slack.MAX_CODE)
_SOFTMAX = tl.constexpr(slack.SOFTMAX)
_SOFTCAP = tl.constexpr(slack.SOFTCAP)
_BIAS = tl.constexpr(slack.BIAS)
_FAR = tl.constexpr(slack.FAR)
_CAST = tl.constexpr(slack.CAST)
_UP = tl.constexpr(slack.RADIUS_UP)
_WITNESS_UNIT = tl.constexpr(32.0**0.5 / 510.0 * (1.0 + 2.0**-15) * slack.RADIUS_UP)
_LOG2E = tl.constexpr(1.4426950408889634)
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
    P_DTYPE: tl.constexpr,
    DOT_ERROR: tl.constexpr,
    EXACT_DOT_ERROR: tl.constexpr,
):
    """Grid ``(requests * m_tiles, Hkv, splits)``; ``k_ptr``, ``v_ptr`` and their strides count words of four
    codes.

    Words are unpacked in registers, so that operands are rearranged as 16-bit numbers, not byte by byte.
    With ``ROWS`` each tile is one query row with its own request (``request_ptr``), position
    (``position_ptr``) and number of paged tokens before it that it may see (``limit_ptr``); otherwise request
    ``b`` owns rows ``b q_len .. b q_len + q_len - 1`` at the end of its tokens (``MULTI``: more than one).
    ``FLAG``: 0 always runs, 1 only when the flag is set, 2 only when it is not.
    """
    NG: tl.constexpr = (D + 31) // 32
    NV: tl.constexpr = (DV + 31) // 32
    if FLAG == 1:
        if tl.load(flag_ptr) == 0:
            return
    if FLAG == 2:
        if tl.load(flag_ptr) != 0:
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
        length = tl.minimum(length, tl.load(limit_ptr + tile))
        limit = length + query * 0
    if begin >= length:
        return
    first = position * 0
    if WINDOW:
        first = tl.maximum(position - window_left, 0)
        if begin + SPLIT <= tl.min(tl.where(valid, first, length), 0):
            return
    end = tl.minimum(begin + SPLIT, length)

    head64 = kv_head.to(tl.int64)
    k_base = k_ptr + head64 * stride_k_head
    v_base = v_ptr + head64 * stride_v_head
    q_base = q_ptr + head[:, None] * stride_q_head
    q = load_groups(q_base, row, stride_q_row, valid, 0.0, D, NG)
    q_columns = ()
    for g in tl.static_range(NG):
        q_columns = q_columns + (tl.trans(q[g]),)
    scale = tl.abs(sm_scale)
    norm1 = ()
    norm2 = ()
    for g in tl.static_range(NG):
        single = q[g].to(tl.float32)
        norm1 = norm1 + (tl.sum(tl.abs(single), 1) * scale,)
        # Rounded up: the sum of 32 squares and the root are within 2^-18.
        norm2 = norm2 + (tl.sqrt(tl.sum(single * single, 1)) * (scale * (1.0 + 2.0**-18)),)
    q_length = tl.zeros((M,), tl.float32)
    if MIXED:
        for g in tl.static_range(NG):
            q_length += norm2[g] * norm2[g]
        # 2^-58 stands for channels whose square underflows.
        q_length = tl.sqrt(q_length) * _UP + 3.469446951953614e-18
    tail = union_tail(limit - first, tl.load(delta_ptr + row, mask=valid, other=0.0)) if METER else 0.0
    slope = tl.load(alibi_ptr + head, mask=valid, other=0.0) if ALIBI else 0.0
    global_head = tl.load(head_id_ptr + kv_head)

    ref = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((N, M), tl.float32)
    out = ()
    for g in tl.static_range(NV):
        out = out + (tl.zeros((M, 32), tl.float32),)
    weights, values = meter_start(N, M)
    # Row 0 is never issued, so the first tile always computes its row's terms.
    current = tl.zeros((), tl.int32)
    kappa = ()
    for g in tl.static_range(NG):
        kappa = kappa + (tl.zeros((M,), tl.float32),)

    for start in range(begin, end, N):
        token = start + tl.arange(0, N)
        live = token < end
        page = tl.load(indices_ptr + page0 + token // PAGE, mask=live, other=0).to(tl.int64)
        offset = token % PAGE
        slot = page * PAGE + offset
        row_id = tl.load(row_id_ptr + slot, mask=live, other=0)
        line = slot * num_kv_heads + kv_head
        k = load_words(k_base + page[:, None] * stride_k_page, offset, stride_k_tok, live, D // 4, NG)
        v = load_words(v_base + page[:, None] * stride_v_page, offset, stride_v_tok, live, DV // 4, NV)

        # Tokens of repaired pages are exact: they have no row, no scale, and radius 0 but for the arithmetic.
        packed = live
        if MIXED:
            entry = tl.load(exact_index_ptr + page * num_kv_heads + kv_head, mask=live, other=-1)
            repaired = entry >= 0
            packed = live & ~repaired
            exact_line = entry.to(tl.int64) * PAGE + offset
        leader = tl.max(tl.where(packed, row_id, -2147483648), 0)
        shared = tl.min(tl.where(packed, row_id, 2147483647), 0) >= leader
        if shared:
            if leader != current:
                current = leader
                kappa = row_terms(q_base, row, stride_q_row, valid, seed, leader, layer, global_head, M, D, NG)

        z = tl.zeros((N, M), tl.float32)
        undithered = tl.zeros((N, M), tl.float32)
        l1 = tl.zeros((N, M), tl.float32)
        variance = tl.zeros((N, M), tl.float32)
        known = live
        stored = tl.zeros((N, M), tl.float32)
        for g in tl.static_range(NG):
            s_raw = tl.load(ks_ptr + line * NG + g, mask=live, other=0.0).to(tl.float32)
            fine = packed & (s_raw >= 0.0) & (s_raw < float("inf"))
            known = known & (fine | ~packed)
            s = tl.where(fine, s_raw, 0.0)
            dot = tl.dot(unpack(k[g], N).to(q_ptr.dtype.element_ty), q_columns[g], input_precision="ieee")
            z += dot * s[:, None]
            if shared:
                undithered += kappa[g][None, :] * s[:, None]
            if METER:
                l1 += norm1[g][None, :] * s[:, None]
                size = norm2[g][None, :] * s[:, None]
                variance += size * size
                if WITNESS:
                    code = tl.load(kw_ptr + line * NG + g, mask=live, other=0).to(tl.float32)
                    stored += size * (code * _WITNESS_UNIT)[:, None]

        if shared == 0:
            scales = ks_ptr + line * NG
            undithered = tile_terms(
                q_base,
                row,
                stride_q_row,
                valid,
                scales,
                row_id,
                packed,
                seed,
                layer,
                global_head,
                N,
                M,
                D,
                NG,
            )
        z = z - undithered
        k_square = tl.zeros((N,), tl.float32)
        if MIXED:
            k_exact = load_groups(k_exact_ptr, exact_line, D, repaired, 0.0, D, NG)
            for g in tl.static_range(NG):
                z = tl.dot(k_exact[g], q_columns[g], z, input_precision="ieee")
                part = k_exact[g].to(tl.float32)
                k_square += tl.sum(part * part, 1)
        z = z * sm_scale
        visible = valid[None, :] & live[:, None]
        if MULTI:
            visible = visible & (token[:, None] < limit[None, :])
        if WINDOW:
            visible = visible & (token[:, None] >= first[None, :])
        if SOFT_CAP:
            z = soft_cap(z, cap)
        if ALIBI:
            bias = slope[None, :] * (token[:, None] - position[None, :]).to(tl.float32)
            z += bias
        z2 = tl.where(visible, z * _LOG2E, float("-inf"))
        ref, safe, factor = next_reference(z2, ref)
        gap = z2 - safe[None, :]
        w = tl.exp2(gap)
        total = total * factor[None, :] + w
        never = packed & (row_id == 0)
        if METER:
            c = dither_radius(l1, variance, tail)
            if WITNESS:
                c = tl.where(stored < c, stored, c)
            c += l1 * (_ARITHMETIC * DOT_ERROR) + _SOFTMAX
            if MIXED:
                c += tl.sqrt(k_square)[:, None] * q_length[None, :] * EXACT_DOT_ERROR
            # Far below the maximum the subtraction rounds; beyond 2^-150 the weight is 0 anyway.
            c += tl.where(gap < -150.0, 150.0, tl.abs(gap)) * _FAR
            if SOFT_CAP:
                c += cap * _SOFTCAP
            if ALIBI:
                c += tl.abs(bias) * _BIAS
            if P_DTYPE != tl.float32:
                c += _CAST
            c = tl.where((known & ~never)[:, None], c, float("inf"))
            c = tl.where(visible, c, 0.0)
            weights = meter_weights(weights, factor, w, c)

        v_square = tl.zeros((N,), tl.float32)
        rho = tl.zeros((N,), tl.float32)
        v_known = live
        if MIXED:
            v_exact = load_groups(v_exact_ptr, exact_line, DV, repaired, 0.0, DV, NV)
        new_out = ()
        for g in tl.static_range(NV):
            s_raw = tl.load(vs_ptr + line * NV + g, mask=live, other=0.0).to(tl.float32)
            fine = packed & (s_raw >= 0.0) & (s_raw < float("inf"))
            v_known = v_known & (fine | ~packed)
            s = tl.where(fine, s_raw, 0.0)
            ws = (w * s[:, None]).to(P_DTYPE)
            code = unpack(v[g], N).to(tl.float32)
            acc = tl.dot(tl.trans(ws), code.to(P_DTYPE), out[g] * factor[:, None], input_precision="ieee")
            if MIXED:
                exact = v_exact[g].to(P_DTYPE)
                acc = tl.dot(tl.trans(w.to(P_DTYPE)), exact, acc, input_precision="ieee")
                if METER:
                    part = v_exact[g].to(tl.float32)
                    v_square += tl.sum(part * part, 1)
            if METER:
                v_square += s * s * tl.sum(code * code, 1)
            new_out = new_out + (acc,)
            if METER:
                channels = 32 if g * 32 + 32 <= DV else DV - g * 32
                rho += channels * (s * s)
        out = new_out

        if METER:
            # Half a step in each channel, with the 2^-13 that dequantization in fp32 may add.
            rho = tl.sqrt(rho) * (0.5 * (1.0 + 2.0**-13) * _UP)
            rho = tl.where(v_known & ~never, rho, float("inf"))
            rho = tl.where(live, rho, 0.0)
            values = meter_values(values, factor, w, v_square, rho, visible)

    cell = (row * num_qo_heads + head) * num_splits + split
    for g in tl.static_range(NV):
        channel = g * 32 + tl.arange(0, 32)
        keep = valid[:, None] & (channel < DV)[None, :]
        tl.store(part_o_ptr + cell[:, None] * DV + channel[None, :], out[g], mask=keep)
    meta = part_m_ptr + cell * _FIELDS
    tl.store(meta, ref, mask=valid)
    tl.store(meta + 1, tl.sum(total, 0), mask=valid)
    if METER:
        meter_store(weights, values, meta, valid, N)
