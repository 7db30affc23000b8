"""Decode attention on the packed INT8 cache, with the meter's accumulators in the same pass.

Shapes: R = B * q_len query rows, Hq = G * Hkv query heads, D and Dv channels, P pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.kernels.counters import counter_of
from witcert_core.kernels.decode.launch import decode_int8_op
from witcert_core.kernels.decode.reference import decode_reference
from witcert_core.kernels.host import dispatch, slack
from witcert_core.kernels.host.backend import check_compute_dtype, resolve
from witcert_core.kernels.host.bypass import BypassedKeys
from witcert_core.kernels.host.exact import check_exact, exact_tensors
from witcert_core.kernels.host.pages import PagedKV, PageTable, check_int8_cache, check_side, split_cache
from witcert_core.kernels.repair.pages import RepairedPages
from witcert_core.meter.sums import NUM_ACC_FIELDS
from witcert_core.quantizers.dither import DitherKey, num_groups


@dataclass(frozen=True)
class Workspace:
    """Partial results of the splits; make it once and reuse it (its size follows the longest request).

    Args:
        part_o: fp32 ``[R, Hq, splits, Dv]``.
        part_m: fp32 ``[R, Hq, splits, 16]``.
    """

    part_o: Tensor
    part_m: Tensor

    @classmethod
    def allocate(cls, rows: int, heads: int, v_dim: int, max_kv_len: int, device: torch.device) -> Workspace:
        splits = dispatch.splits_for(max_kv_len)
        shape = (rows, heads, splits)
        return cls(
            torch.empty(*shape, v_dim, dtype=torch.float32, device=device),
            torch.empty(*shape, slack.META_FIELDS, dtype=torch.float32, device=device),
        )

    @property
    def capacity(self) -> int:
        """Longest request that fits."""
        return int(self.part_o.shape[2]) * slack.SPLIT_TOKENS


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
    kv_layout: str = "NHD",
    sm_scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_len: int = 1,
    meter: bool = True,
    delta_loc: Tensor | None = None,
    witness: Tensor | None = None,
    repaired: RepairedPages | None = None,
    bypass: BypassedKeys | None = None,
    flag: Tensor | None = None,
    unmetered: bool = True,
    counters: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    acc: Tensor | None = None,
    workspace: Workspace | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend, and measure.

    Args:
        q: ``[R, Hq, D]`` fp32, fp16 or bf16; row ``b q_len + i`` is query ``i`` of request ``b``, whose
            ``q_len`` newest tokens are the queries' own (causal among them).
        paged_kv_cache: int8 codes, a pair of 4-D or one 5-D tensor, NHD or HND.
        k_scales, v_scales: fp16 ``[P, page_size, Hkv, Gr]``.
        table: the pages of each request.
        pass_ids: uint32 (or int32 bits) ``[slots]`` dither row of each slot, 0 for never written.
        layer: index in the whole model.
        head_ids: int32 ``[Hkv]`` **global** KV head of each local one.
        key: Philox key of the dither.
        max_kv_len: no request is longer; fixes the grid, so that a captured graph fits later steps.
        k_scale, v_scale: what the decoded K and V are multiplied with.
        window_left: tokens before the query's own that it sees; negative for all.
        logits_soft_cap: 0 for none.
        sinks: ``[Hq]`` learned sink logits. alibi_slopes: ``[Hq]``.
        meter: also compute accumulators (the output is bitwise the same without).
        delta_loc: fp32 ``[R]`` probability a cell may spend; absent or 0: deterministic radii.
        witness: uint8 ``[P, page_size, Hkv, Gr]`` group witnesses of K (276-byte layout).
        repaired: pages that are exact; needs ``k_scale`` and ``v_scale`` of 1.
        bypass: K channels kept in 16 bit, in the dtype of the queries.
        flag: int32 ``[1]`` on the device, read by the kernels: 0 skips the meter (captured graphs).
        unmetered: with a flag, also launch the form without the meter, which runs where the flag is 0; without it
            nothing is done there.
        counters: int64 ``[layers]``; entry ``layer`` grows by the number of cells measured.
        out, lse, acc, workspace: preallocated results and scratch.

    Returns:
        ``out [R, Hq, Dv]`` in q's dtype; ``lse [R, Hq]`` fp32, **base 2**, sink included; ``acc [R, Hq, 16]``
        fp32 in the order of ``AccField``, untouched where nothing was measured.
    """
    k, v = split_cache(paged_kv_cache, kv_layout)
    check_int8_cache(k, v, k_scales, v_scales)
    kv_heads, head_dim, page_size, v_dim = k.shape[2], k.shape[3], k.shape[1], v.shape[3]
    if q_len < 1:
        raise InputError(f"q_len is {q_len}; it must be at least 1")
    rows, heads = table.batch_size * q_len, q.shape[1]
    dispatch.check_queries(q, head_dim, kv_heads, rows)
    dispatch.check_vector("head_ids", head_ids, kv_heads, torch.int32)
    dispatch.check_vector("delta_loc", delta_loc, rows, torch.float32)
    if witness is not None:
        check_side("witness", witness, k, num_groups(head_dim), torch.uint8)
    check_exact(repaired, bypass, k, v_dim, q.dtype, k_scale, v_scale)
    ids = dispatch.pass_bits(pass_ids, k.shape[0] * page_size)
    scale = dispatch.default_scale(sm_scale, head_dim, k_scale)
    sinks = dispatch.kernel_float(sinks, "sinks", heads)
    slopes = dispatch.kernel_float(alibi_slopes, "alibi_slopes", heads)
    if resolve(backend, q.device) == "reference":
        result = decode_reference(
            q,
            k,
            v,
            k_scales,
            v_scales,
            table,
            ids,
            layer=layer,
            head_ids=head_ids.tolist(),
            key=key,
            sm_scale=scale,
            v_scale=v_scale,
            delta_loc=delta_loc,
            witness=witness,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sinks=sinks,
            alibi_slopes=slopes,
            q_len=q_len,
            repaired=repaired,
            bypass=bypass,
        )
        return result[0].to(q.dtype), result[1].to(torch.float32), result[2].to(torch.float32)

    check_compute_dtype(q.dtype)
    space = workspace or Workspace.allocate(rows, heads, v_dim, max_kv_len, q.device)
    if space.capacity < max_kv_len or space.part_o.shape[:2] != (rows, heads):
        raise InputError(
            f"the workspace is for {tuple(space.part_o.shape[:2])} rows and heads up to {space.capacity} "
            f"tokens, not for {(rows, heads)} up to {max_kv_len}"
        )
    out = torch.empty(rows, heads, v_dim, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device) if lse is None else lse
    if acc is None:
        size = rows if meter else 0
        acc = torch.full((size, heads, NUM_ACC_FIELDS), float("inf"), dtype=torch.float32, device=q.device)
    counter = counter_of(counters, layer, q.device)
    if delta_loc is None:
        delta_loc = torch.zeros(rows, dtype=torch.float32, device=q.device)
    # With a flag both forms are launched, and each looks at the flag on the device.
    runs = [(meter, 0)] if flag is None or not meter else [(True, 1), (False, 2)][: 2 if unmetered else 1]
    for measured, run_if in runs:
        decode_int8_op(
            q,
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
            delta_loc,
            sinks,
            slopes,
            flag,
            *exact_tensors(repaired, bypass),
            out,
            lse,
            acc,
            space.part_o,
            space.part_m,
            counter,
            layer,
            dispatch.seed_of(key),
            scale,
            v_scale,
            logits_soft_cap,
            window_left,
            q_len,
            measured,
            run_if,
        )
    return out, lse, acc


__all__ = ["Workspace", "decode_int8"]
