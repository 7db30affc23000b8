"""Decode attention on the packed INT8 cache, with the meter's accumulators in the same pass.

Shapes: R = B * q_len query rows, Hq = G * Hkv query heads, D and Dv channels, P pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.kernels.counters import counter_of
from witcert_core.kernels.decode.cpu import decode_cpu
from witcert_core.kernels.decode.launch import launch_decode
from witcert_core.kernels.decode.reference import decode_reference
from witcert_core.kernels.host import checks
from witcert_core.kernels.host.arguments import DitherOf, PackedCache, attention_spec
from witcert_core.kernels.host.bypass import BypassedKeys
from witcert_core.kernels.host.dispatch import check_compute_dtype, resolve
from witcert_core.kernels.host.launch import Workspace
from witcert_core.kernels.host.pages import PagedKV, PageTable
from witcert_core.meter.sums import NUM_ACC_FIELDS
from witcert_core.quantizers.dither import DitherKey


def decode_int8(
    q: Tensor,
    paged_kv_cache: PagedKV,
    k_scales: Tensor,
    v_scales: Tensor,
    table: PageTable,
    pass_ids: Tensor,
    *,
    layer: int,
    head_ids: Tensor,
    key: DitherKey,
    max_kv_len: int,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    q_len: int = 1,
    meter: bool = True,
    delta_loc: Tensor | None = None,
    witness: Tensor | None = None,
    bypass: BypassedKeys | None = None,
    flag: Tensor | None = None,
    unmetered: bool = True,
    counters: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    acc: Tensor | None = None,
    workspace: Workspace | None = None,
    checked: PackedCache | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend, and measure.

    Args:
        q: ``[R, Hq, D]`` fp32, fp16 or bf16; row ``b q_len + i`` is query ``i`` of request ``b``, whose
            ``q_len`` newest tokens are the queries' own (causal among them).
        paged_kv_cache: int8 codes ``[P, page_size, Hkv, D]`` and ``[P, page_size, Hkv, Dv]``.
        k_scales, v_scales: fp16 ``[P, page_size, Hkv, Gr]``.
        table: the pages of each request (``kv_indptr``, ``kv_indices``, ``kv_last_page_len``).
        pass_ids: uint32 (or int32 bits) ``[slots]`` pass that wrote each slot, 0 for never written.
        layer: index in the whole model.
        head_ids: int32 ``[Hkv]`` **global** KV head of each local one.
        key: Philox key of the dither.
        max_kv_len: no request is longer; fixes the grid, so that a captured graph fits later steps.
        sm_scale: factor of the logits; ``1 / sqrt(D)`` by default.
        window_left: tokens before the query's own that it sees; negative for all.
        logits_soft_cap: 0 for none.
        sinks: ``[Hq]`` learned sink logits.
        meter: also compute accumulators (the output is bitwise the same without).
        delta_loc: fp32 ``[R]`` probability a cell may spend; absent or 0: deterministic radii.
        witness: uint8 ``[P, page_size, Hkv, Gr]`` group witnesses of K (276-byte layout).
        bypass: K channels kept in 16 bit, in the dtype of the queries.
        flag: int32 ``[1]`` on the device, read by the kernels: 0 skips the meter (captured graphs).
        unmetered: with a flag, also launch the form without the meter, which runs where the flag is 0; without it
            nothing is done there.
        counters: int64 ``[layers]``; entry ``layer`` grows by the number of cells measured.
        out, lse, acc, workspace: preallocated results and scratch.
        checked: the cache of these arguments, checked before for this dtype, which small calls would wait for again.

    Returns:
        ``out [R, Hq, Dv]`` in q's dtype; ``lse [R, Hq]`` fp32, **base 2**, sink included; ``acc [R, Hq, 16]``
        fp32 in the order of ``AccField``, untouched where nothing was measured.

    Raises:
        InputError: shapes, strides or dtypes that do not fit together, or a workspace too small.
        UnsupportedError: a device or a dtype that the backend cannot compute with.
    """
    if checked is None:
        given = (paged_kv_cache, k_scales, v_scales, pass_ids, head_ids, witness, bypass)
        checked = PackedCache.checked(*given, q.dtype)
    cache = checked
    if q_len < 1:
        raise InputError(f"q_len is {q_len}; it must be at least 1")
    kv_heads, head_dim = cache.k.shape[2:]
    rows, heads, v_dim = table.batch_size * q_len, q.shape[1], cache.v.shape[3]
    checks.check_queries(q, head_dim, kv_heads, rows)
    checks.check_vector("delta_loc", delta_loc, rows, torch.float32)
    spec = attention_spec(q, sm_scale, logits_soft_cap, window_left, sinks)
    dither = DitherOf(key, layer)
    backend = resolve(backend, q.device)
    if backend == "reference":
        found = decode_reference(q, cache, table, dither, spec, delta_loc, q_len=q_len)
        return found[0].to(q.dtype), found[1].to(torch.float32), found[2].to(torch.float32)

    check_compute_dtype(q.dtype, backend)
    out = torch.empty(rows, heads, v_dim, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device) if lse is None else lse
    if acc is None:
        size = rows if meter else 0
        acc = torch.full((size, heads, NUM_ACC_FIELDS), float("inf"), dtype=torch.float32, device=q.device)
    counter = counter_of(counters, layer)
    if backend == "cpu":
        cells = decode_cpu(q, cache, table, dither, spec, delta_loc, out, lse, acc if meter else None, q_len=q_len)
        if counter is not None and meter:
            counter += cells
        return out, lse, acc
    space = workspace or Workspace.allocate(rows, heads, v_dim, max_kv_len, q.device)
    if space.capacity < max_kv_len or space.part_o.shape[:2] != (rows, heads):
        raise InputError(
            f"the workspace is for {tuple(space.part_o.shape[:2])} rows and heads up to {space.capacity} "
            f"tokens, not for {(rows, heads)} up to {max_kv_len}"
        )
    if delta_loc is None:
        delta_loc = torch.zeros(rows, dtype=torch.float32, device=q.device)
    flag = flag if meter else None
    # With a flag both forms are launched, and each looks at the flag on the device.
    for measured in (True, False) if flag is not None and unmetered else (meter,):
        launch_decode(
            q,
            cache,
            table,
            dither,
            spec,
            delta_loc,
            space,
            out,
            lse,
            acc if measured else None,
            q_len=q_len,
            flag=flag,
            counter=counter if measured else None,
        )
    return out, lse, acc


__all__ = ["Workspace", "decode_int8"]
