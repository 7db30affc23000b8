"""Chunked prefill over an INT8 prefix and the chunk's own exact keys, and the exact tail of a metered row."""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# mypy: disable-error-code="assignment,index"

from __future__ import annotations

import triton
import triton.language as tl

from witcert_core.kernels.device.packed_tile import packed_head, packed_queries, packed_tile
from witcert_core.kernels.device.paged import request_span
from witcert_core.kernels.device.radius import dot_error
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
_SPLIT = tl.constexpr(slack.SPLIT_TOKENS)


@triton.jit
def new_tile(q, k_new, v_new, row, kv_head, live, SHAPE: tl.constexpr):
    """Of new tokens in ``row [N]``: products ``[N, M]`` with exact keys, the keys, and values ``[N, GV, 32]``."""
    head64 = kv_head.to(tl.int64)
    k = load_groups(k_new.ptr + head64 * k_new.head + row * k_new.row, live, SHAPE.D)
    v = load_values(v_new.ptr + head64 * v_new.head + row * v_new.row, live, SHAPE.DV, SHAPE.GV)
    z = tl.zeros((SHAPE.N, SHAPE.M), tl.float32)
    for g in tl.static_range(SHAPE.NG):
        z = tl.dot(k[g], q[g], z, input_precision="ieee")
    return z, k, v


@triton.jit(do_not_specialize=["layer", "seed"])
def extend_attention(
    q,
    k_new,
    v_new,
    cache,
    pages,
    qo_indptr_ptr,
    sink_ptr,
    out,
    lse_ptr,
    layer,
    seed,
    sm_scale,
    cap,
    window_left,
    num_qo_heads,
    num_kv_heads,
    SHAPE: tl.constexpr,
):
    """Grid ``(ceil(max_q_len G / M), Hkv, B)``: all rows of a chunk, unmetered.

    ``q``, ``k_new``, ``v_new``, ``out``: :class:`Heads`; ``cache``: :class:`PackedPages` of the prefix. ``sink_ptr``,
    ``cap`` and ``window_left`` are None where there is none.
    """
    request = tl.program_id(2)
    kv_head = tl.program_id(1)
    row0 = tl.load(qo_indptr_ptr + request)
    q_len = tl.load(qo_indptr_ptr + request + 1) - row0
    pair = tl.program_id(0) * SHAPE.M + tl.arange(0, SHAPE.M)
    if tl.program_id(0) * SHAPE.M >= q_len * SHAPE.G:
        return
    query = pair // SHAPE.G
    valid = pair < q_len * SHAPE.G
    row = (row0 + query).to(tl.int64)
    head = kv_head * SHAPE.G + pair % SHAPE.G
    page0, prefix = request_span(pages, request, SHAPE.PAGE)
    position = prefix + query
    first = position * 0
    if window_left is not None:
        first = tl.maximum(position - window_left, 0)

    q_base = q.ptr + row * q.row + head * q.head
    ref = tl.full((SHAPE.M,), float("-inf"), tl.float32)
    total = tl.zeros((SHAPE.M,), tl.float32)
    value = tl.zeros((SHAPE.GV, 32, SHAPE.M), tl.float32)

    begin = tl.min(tl.where(valid, first, prefix), 0) // SHAPE.N * SHAPE.N
    if begin < prefix:
        mine = packed_head(cache, pages.indices, kv_head, num_kv_heads, seed, layer, SHAPE)
        queries, _q, _lost = packed_queries(mine, q_base, valid, page0, begin, SHAPE)
        for start in range(begin, prefix, SHAPE.N):
            token = start + tl.arange(0, SHAPE.N)
            # Past the end the last token stands in: nothing is masked, and no other slot is read.
            tile = packed_tile(mine, queries, tl.minimum(token, prefix - 1), page0, SHAPE)
            z = soft_cap(tile.z * sm_scale, cap)
            visible = valid[None, :] & (token < prefix)[:, None] & (token[:, None] >= first[None, :])
            w, ref, factor, _ = weigh(z, visible, ref)
            total = total * factor + tl.sum(w, 0)
            value = add_values(value, factor, w, tile.v_step, tile.v, SHAPE.M, SHAPE.P_DTYPE)

    # From here the queries are whole: the chunk has no bypassed channels.
    whole = load_queries(q_base, valid, None, SHAPE.D)
    last = tl.minimum((tl.program_id(0) * SHAPE.M + SHAPE.M - 1) // SHAPE.G + 1, q_len)
    for start in range(0, last, SHAPE.N):
        token = start + tl.arange(0, SHAPE.N)
        live = token < last
        z, _, v = new_tile(whole, k_new, v_new, (row0 + token).to(tl.int64), kv_head, live, SHAPE)
        visible = valid[None, :] & live[:, None] & (token[:, None] <= query[None, :])
        visible = visible & ((prefix + token)[:, None] >= first[None, :])
        w, ref, factor, _ = weigh(soft_cap(z * sm_scale, cap), visible, ref)
        total = total * factor + tl.sum(w, 0)
        value = add_whole_values(value, factor, w, v, SHAPE.M, SHAPE.P_DTYPE)

    if sink_ptr is not None:
        sink2 = tl.load(sink_ptr + head, mask=valid, other=0.0) * _LOG2E
        top = tl.maximum(ref, tl.ceil(sink2))
        factor = tl.where(ref == float("-inf"), 0.0, tl.exp2(ref - top))
        total = total * factor + tl.exp2(sink2 - top)
        ref = top
        value = value * factor[None, None, :]
    target = out.ptr + row * out.row + head * out.head
    store_values(target, value / total[None, None, :], SHAPE.DV, valid, SHAPE.GV, SHAPE.M)
    tl.store(lse_ptr + row * num_qo_heads + head, ref + tl.log2(total), mask=valid)


@triton.jit
def tail_split(
    q,
    k_new,
    v_new,
    start_ptr,
    limit_ptr,
    tail_len_ptr,
    part_o_ptr,
    part_m_ptr,
    sm_scale,
    cap,
    window_left,
    num_splits,
    num_qo_heads,
    SHAPE: tl.constexpr,
):
    """Grid ``(rows, Hkv, tail splits)``: the new keys a metered row sees, exact but for the kernel's own
    arithmetic.

    Row ``r`` of ``q`` sees ``tail_len_ptr[r]`` of them from row ``start_ptr[r]`` of ``k_new``, in splits after those
    of its ``limit_ptr[r]`` paged tokens.
    """
    r = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    begin = tl.program_id(2) * _SPLIT
    tail = tl.load(tail_len_ptr + r)
    if begin >= tail:
        return
    end = tl.minimum(begin + _SPLIT, tail)
    row0 = tl.load(start_ptr + r).to(tl.int64)
    split = (tl.load(limit_ptr + r) + _SPLIT - 1) // _SPLIT + tl.program_id(2)
    pair = tl.arange(0, SHAPE.M)
    valid = pair < SHAPE.G
    head = kv_head * SHAPE.G + pair
    whole = load_queries(q.ptr + r * q.row + head * q.head, valid, None, SHAPE.D)
    length_q = query_length(whole, SHAPE.M, SHAPE.NG) * tl.abs(sm_scale)
    first = 0
    if window_left is not None:
        first = tail - 1 - window_left
    ref = tl.full((SHAPE.M,), float("-inf"), tl.float32)
    total = tl.zeros((SHAPE.N, SHAPE.M), tl.float32)
    out = tl.zeros((SHAPE.GV, 32, SHAPE.M), tl.float32)
    weights, values = meter_start(SHAPE.N, SHAPE.M, 1)
    for start in range(begin, end, SHAPE.N):
        token = start + tl.arange(0, SHAPE.N)
        live = token < end
        z, k, v = new_tile(whole, k_new, v_new, row0 + token, kv_head, live, SHAPE)
        seen = live
        if window_left is not None:
            seen = seen & (token >= first)
        visible = valid[None, :] & seen[:, None]
        w, ref, factor, gap = weigh(soft_cap(z * sm_scale, cap), visible, ref)
        total = total * factor[None, :] + w
        c = tl.sqrt(squares(k, SHAPE.N, SHAPE.NG))[:, None] * length_q[None, :] * dot_error(SHAPE.D)
        c += softmax_radius(gap, cap, tl.float32 != SHAPE.P_DTYPE)
        weights = meter_weights(weights, factor, w, tl.where(visible, c, 0.0))
        out = add_whole_values(out, factor, w, v, SHAPE.M, SHAPE.P_DTYPE)
        x = v.to(tl.float32)
        v_square = tl.sum(tl.sum(x * x, 2), 1)
        values = meter_values(values, factor, w, v_square, tl.zeros((SHAPE.N,), tl.float32), seen[:, None])
    cell = (r * num_qo_heads + head) * num_splits + split
    store_values(part_o_ptr + cell * SHAPE.DV, out, SHAPE.DV, valid, SHAPE.GV, SHAPE.M)
    meta = part_m_ptr + cell * _FIELDS
    store_sums(meta, ref, total, valid, sees_some(valid, first, tail, begin, end, window_left is not None, False))
    meter_store(weights, values, meta, valid, length_q < float("inf"), SHAPE.N)
