"""Chunked prefill on the packed INT8 cache: earlier tokens from their pages, the chunk's own keys exact.

Shapes: T new tokens of B requests, Hq = G * Hkv query heads, D and Dv channels, P pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.kernels.extend.cpu import extend_cpu
from witcert_core.kernels.extend.launch import Chunk, launch_extend, launch_extend_meter
from witcert_core.kernels.extend.reference import extend_reference
from witcert_core.kernels.host import checks
from witcert_core.kernels.host.arguments import DitherOf, PackedCache, attention_spec
from witcert_core.kernels.host.bypass import BypassedKeys
from witcert_core.kernels.host.dispatch import check_compute_dtype, resolve
from witcert_core.kernels.host.pages import PagedKV, PageTable
from witcert_core.meter.sums import NUM_ACC_FIELDS
from witcert_core.quantizers.dither import DitherKey


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
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    bypass: BypassedKeys | None = None,
    checked: PackedCache | None = None,
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
        meter_rows: int32 ``[R]`` rows of ``q`` to measure; a row may be named twice, with two ``delta_loc``.
        delta_loc: fp32 ``[R]`` probability each of their cells may spend.
        bypass: K channels of the prefix kept in 16 bit; the chunk's own keys are whole.

    The remaining arguments and errors are those of :func:`~witcert_core.kernels.decode.decode_int8`.

    Returns:
        ``out [T, Hq, Dv]`` in q's dtype, ``lse [T, Hq]`` fp32 base 2, ``acc [R, Hq, 16]`` fp32.
    """
    if checked is None:
        given = (paged_kv_cache, k_scales, v_scales, pass_ids, head_ids, witness, bypass)
        checked = PackedCache.checked(*given, q.dtype)
    cache = checked
    chunk = Chunk(q, k_new, v_new, qo_indptr, table, max_q_len, max_kv_len)
    _check(chunk, cache)
    if meter_rows is None:
        meter_rows = torch.empty(0, dtype=torch.int32, device=q.device)
    count = meter_rows.numel()
    checks.check_vector("meter_rows", meter_rows, count, torch.int32)
    checks.check_vector("delta_loc", delta_loc, count, torch.float32)
    spec = attention_spec(q, sm_scale, logits_soft_cap, window_left, sinks)
    dither = DitherOf(key, layer)
    backend = resolve(backend, q.device)
    if backend == "reference":
        found = extend_reference(chunk, cache, dither, spec, meter_rows, delta_loc)
        return found[0].to(q.dtype), found[1].to(torch.float32), found[2].to(torch.float32)

    check_compute_dtype(q.dtype, backend)
    heads = q.shape[1]
    out = torch.empty(*q.shape[:2], v_new.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    acc = torch.full((count, heads, NUM_ACC_FIELDS), float("inf"), dtype=torch.float32, device=q.device)
    if backend == "cpu":
        extend_cpu(chunk, cache, dither, spec, meter_rows, delta_loc, out, lse, acc)
        return out, lse, acc
    launch_extend(chunk, cache, dither, spec, out, lse)
    if count:
        if delta_loc is None:
            delta_loc = torch.zeros(count, dtype=torch.float32, device=q.device)
        launch_extend_meter(chunk, meter_rows, cache, dither, spec, delta_loc, out, lse, acc)
    return out, lse, acc


def _check(chunk: Chunk, cache: PackedCache) -> None:
    """Raise unless the chunk fits the cache."""
    kv_heads, head_dim = cache.k.shape[2:]
    q, k, v = chunk.q, chunk.k, chunk.v
    checks.check_queries(q, head_dim, kv_heads, None)
    wanted = [(q.shape[0], kv_heads, x.shape[3]) for x in (cache.k, cache.v)]
    if [tuple(k.shape), tuple(v.shape)] != wanted:
        raise InputError(
            f"k_new {tuple(k.shape)} and v_new {tuple(v.shape)} must be {list(wanted[0])} and {list(wanted[1])}"
        )
    if not q.dtype == k.dtype == v.dtype or k.stride(2) != 1 or v.stride(2) != 1:
        raise InputError("q, k_new and v_new must have one dtype and adjacent channels")
    checks.check_vector("qo_indptr", chunk.qo_indptr, chunk.table.batch_size + 1, torch.int32)


__all__ = ["extend_int8"]
