"""Chunked prefill on the packed INT8 cache: earlier tokens from their pages, the chunk's own keys exact.

Shapes: T new tokens of B requests, Hq = G * Hkv query heads, D and Dv channels, P pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.kernels.counters import counter_of
from witcert_core.kernels.extend.launch import extend_int8_op, extend_meter_op
from witcert_core.kernels.extend.reference import extend_reference
from witcert_core.kernels.host import dispatch, slack
from witcert_core.kernels.host.backend import check_compute_dtype, resolve
from witcert_core.kernels.host.bypass import BypassedKeys
from witcert_core.kernels.host.exact import check_exact, exact_tensors
from witcert_core.kernels.host.pages import PagedKV, PageTable, check_int8_cache, check_side, split_cache
from witcert_core.kernels.repair.pages import RepairedPages
from witcert_core.meter.sums import NUM_ACC_FIELDS
from witcert_core.quantizers.dither import DitherKey, num_groups


def extend_int8(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    paged_kv_cache: PagedKV,
    k_scales: Tensor,
    v_scales: Tensor,
    qo_indptr: Tensor,
    table: PageTable,
    pass_ids: Tensor,
    *,
    layer: int,
    head_ids: Tensor,
    key: DitherKey,
    max_q_len: int,
    max_kv_len: int,
    meter_rows: Tensor | None = None,
    delta_loc: Tensor | None = None,
    witness: Tensor | None = None,
    kv_layout: str = "NHD",
    sm_scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    repaired: RepairedPages | None = None,
    bypass: BypassedKeys | None = None,
    counters: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend a chunk, and measure the rows asked for.

    A metered row is computed by the metered kernel and replaces the plain result, so that its accumulators
    speak of exactly the weights behind its output.

    Args:
        q, k_new, v_new: ``[T, Hq, D]``, ``[T, Hkv, D]``, ``[T, Hkv, Dv]`` of one dtype; request ``b`` owns
            rows ``qo_indptr[b]:qo_indptr[b + 1]`` (int32 ``[B + 1]``), which follow its prefix, causal among
            themselves.
        table: pages of the **prefix** of each request (none for a cold prompt).
        max_q_len, max_kv_len: no chunk and no prefix is longer.
        meter_rows: int32 ``[R]`` rows of ``q`` to measure.
        delta_loc: fp32 ``[R]`` probability each of their cells may spend.
        k_scale, v_scale: what the decoded prefix is multiplied with; the chunk is taken as it is.
        repaired: prefix pages that are exact; needs ``k_scale`` and ``v_scale`` of 1.
        bypass: K channels of the prefix kept in 16 bit; the chunk's own keys are whole.

    The remaining arguments are those of :func:`~witcert_core.kernels.decode.decode_int8`.

    Returns:
        ``out [T, Hq, Dv]`` in q's dtype, ``lse [T, Hq]`` fp32 base 2, ``acc [R, Hq, 16]`` fp32.
    """
    k, v = split_cache(paged_kv_cache, kv_layout)
    check_int8_cache(k, v, k_scales, v_scales)
    page_size, kv_heads, head_dim = k.shape[1:]
    v_dim, heads = v.shape[3], q.shape[1]
    dispatch.check_queries(q, head_dim, kv_heads, None)
    tokens = q.shape[0]
    if k_new.shape != (tokens, kv_heads, head_dim) or v_new.shape != (tokens, kv_heads, v_dim):
        raise InputError(
            f"k_new {tuple(k_new.shape)} and v_new {tuple(v_new.shape)} must be "
            f"[{tokens}, {kv_heads}, {head_dim}] and [{tokens}, {kv_heads}, {v_dim}]"
        )
    if not q.dtype == k_new.dtype == v_new.dtype or k_new.stride(2) != 1 or v_new.stride(2) != 1:
        raise InputError("q, k_new and v_new must have one dtype and adjacent channels")
    dispatch.check_vector("qo_indptr", qo_indptr, table.batch_size + 1, torch.int32)
    dispatch.check_vector("head_ids", head_ids, kv_heads, torch.int32)
    if witness is not None:
        check_side("witness", witness, k, num_groups(head_dim), torch.uint8)
    if meter_rows is None:
        meter_rows = torch.empty(0, dtype=torch.int32, device=q.device)
    dispatch.check_vector("meter_rows", meter_rows, meter_rows.numel(), torch.int32)
    count = meter_rows.numel()
    dispatch.check_vector("delta_loc", delta_loc, count, torch.float32)
    check_exact(repaired, bypass, k, v_dim, q.dtype, k_scale, v_scale)
    if v_scale == 0.0:
        raise InputError("v_scale is 0; it must not be")
    ids = dispatch.pass_bits(pass_ids, k.shape[0] * page_size)
    new_scale = dispatch.default_scale(sm_scale, head_dim, 1.0)
    scale = dispatch.default_scale(sm_scale, head_dim, k_scale)
    sinks = dispatch.kernel_float(sinks, "sinks", heads)
    slopes = dispatch.kernel_float(alibi_slopes, "alibi_slopes", heads)
    index = meter_rows.to(torch.int64)
    if resolve(backend, q.device) == "reference":
        spread = None
        if delta_loc is not None:
            spread = torch.zeros(tokens).index_copy(0, index, delta_loc)
        result = extend_reference(
            q,
            k_new,
            v_new,
            k,
            v,
            k_scales,
            v_scales,
            qo_indptr,
            table,
            ids,
            layer=layer,
            head_ids=head_ids.tolist(),
            key=key,
            sm_scale=new_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            delta_loc=spread,
            witness=witness,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sinks=sinks,
            alibi_slopes=slopes,
            repaired=repaired,
            bypass=bypass,
        )
        return result[0].to(q.dtype), result[1].to(torch.float32), result[2][index].to(torch.float32)
    check_compute_dtype(q.dtype)
    out = torch.empty(tokens, heads, v_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    acc = torch.full((count, heads, NUM_ACC_FIELDS), float("inf"), dtype=torch.float32, device=q.device)
    seed = dispatch.seed_of(key)
    exact = exact_tensors(repaired, bypass)
    extend_int8_op(
        q,
        k_new,
        v_new,
        k,
        v,
        k_scales,
        v_scales,
        ids,
        head_ids,
        qo_indptr,
        table.indptr,
        table.indices,
        table.last_page_len,
        sinks,
        slopes,
        *exact,
        out,
        lse,
        max_q_len,
        layer,
        seed,
        scale,
        new_scale,
        v_scale,
        logits_soft_cap,
        window_left,
    )
    if count == 0:
        return out, lse, acc
    tail_splits = dispatch.splits_for(max_q_len)
    splits = dispatch.splits_for(max_kv_len) + tail_splits
    part_o = torch.empty(count, heads, splits, v_dim, dtype=torch.float32, device=q.device)
    part_m = torch.empty(count, heads, splits, slack.META_FIELDS, dtype=torch.float32, device=q.device)
    request = torch.searchsorted(qo_indptr, meter_rows, right=True, out_int32=True) - 1
    start = qo_indptr[request.to(torch.int64)]
    pages = table.indptr[1:] - table.indptr[:-1]
    lengths = torch.where(pages > 0, (pages - 1) * page_size + table.last_page_len, 0)
    limit = lengths[request.to(torch.int64)].to(torch.int32)
    tail_len = meter_rows - start + 1
    counter = counter_of(counters, layer, q.device)
    if delta_loc is None:
        delta_loc = torch.zeros(count, dtype=torch.float32, device=q.device)
    extend_meter_op(
        q[index].contiguous(),
        k_new,
        v_new,
        k,
        v,
        k_scales,
        v_scales,
        witness,
        ids,
        head_ids,
        table.indptr,
        table.indices,
        table.last_page_len,
        meter_rows,
        request,
        start,
        limit,
        limit + tail_len - 1,
        tail_len,
        delta_loc,
        sinks,
        slopes,
        *exact,
        out,
        lse,
        acc,
        part_o,
        part_m,
        counter,
        tail_splits,
        layer,
        seed,
        scale,
        new_scale,
        v_scale,
        logits_soft_cap,
        window_left,
    )
    return out, lse, acc


__all__ = ["extend_int8"]
