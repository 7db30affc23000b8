"""Custom ops of the extend step: attention of all rows, and the metered pass of the rows asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.kernels.decode.launch import launch_decode_split
from witcert_core.kernels.host import slack
from witcert_core.kernels.host.launch import (
    NUM_WARPS,
    TILE_ROWS,
    TILE_TOKENS,
    Attention,
    PackedView,
    Pages,
    Rows,
    Tail,
    group_count,
    launch_merge,
    scale_words,
    weight_dtype,
)

TILE_PAIRS = 32


def launch_tail_split(
    q_rows: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    start: Tensor,
    limit: Tensor,
    tail_len: Tensor,
    part_o: Tensor,
    part_m: Tensor,
    call: Attention,
    *,
    splits: int,
    meter: bool,
    alibi_slopes: Tensor | None = None,
) -> None:
    """Split pass of rows ``[R, Hq, D]`` over contiguous exact keys: ``tail_len [R]`` of them from row ``start [R]``
    of ``k_new``, in ``splits`` splits after those of ``limit [R]`` paged tokens."""
    import triton

    from witcert_core.kernels.extend.triton import tail_split

    num_rows, heads, head_dim = q_rows.shape
    kv_heads, v_dim = k_new.shape[1], v_new.shape[2]
    group = heads // kv_heads
    tail_split[(num_rows, kv_heads, splits)](
        q_rows,
        k_new,
        v_new,
        start,
        limit,
        tail_len,
        part_m if alibi_slopes is None else alibi_slopes,
        part_o,
        part_m,
        q_rows.stride(0),
        q_rows.stride(1),
        k_new.stride(0),
        k_new.stride(1),
        v_new.stride(0),
        v_new.stride(1),
        call.sm_scale,
        1.0 / call.v_scale,
        call.logits_soft_cap,
        call.window_left,
        part_m.shape[2],
        heads,
        G=group,
        D=head_dim,
        DV=v_dim,
        GV=group_count(v_dim),
        M=max(TILE_ROWS, triton.next_power_of_2(group)),
        N=TILE_TOKENS,
        SPLIT=slack.SPLIT_TOKENS,
        SOFT_CAP=call.logits_soft_cap > 0.0,
        WINDOW=call.window_left >= 0,
        ALIBI=alibi_slopes is not None,
        METER=meter,
        P_DTYPE=weight_dtype(q_rows.dtype),
        DOT_ERROR=slack.dot_error(head_dim),
        num_warps=NUM_WARPS,
        num_stages=1,
    )


@torch.library.custom_op("witcert::extend_int8", mutates_args=("out", "lse"))
def extend_int8_op(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k: Tensor,
    v: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
    pass_ids: Tensor,
    head_ids: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    exact_index: Tensor | None,
    k_exact: Tensor | None,
    v_exact: Tensor | None,
    bypass_keep: Tensor | None,
    bypass_channels: Tensor | None,
    k_bypass: Tensor | None,
    out: Tensor,
    lse: Tensor,
    max_q_len: int,
    layer: int,
    seed: int,
    sm_scale: float,
    new_scale: float,
    v_scale: float,
    logits_soft_cap: float,
    window_left: int,
) -> None:
    """All rows, unmetered; caches as ``[P, page_size, Hkv, D]`` views."""
    import triton

    from witcert_core.kernels.extend.triton import extend_attention

    heads, head_dim = q.shape[1:]
    kv_heads, page_size, v_dim = k.shape[2], k.shape[1], v.shape[3]
    group, requests = heads // kv_heads, qo_indptr.numel() - 1
    if q.shape[0] == 0 or max_q_len == 0:
        return
    bypass = 0 if bypass_channels is None else int(bypass_channels.shape[1])
    extend_attention[(-(-max_q_len * group // TILE_PAIRS), kv_heads, requests)](
        q,
        k_new,
        v_new,
        k,
        v,
        scale_words(k_scales),
        v_scales,
        pass_ids,
        head_ids,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_last_page_len,
        lse if sinks is None else sinks,
        lse if alibi_slopes is None else alibi_slopes,
        kv_indptr if exact_index is None else exact_index,
        q if k_exact is None else k_exact,
        q if v_exact is None else v_exact,
        kv_indptr if bypass_keep is None else bypass_keep,
        kv_indptr if bypass_channels is None else bypass_channels,
        q if k_bypass is None else k_bypass,
        out,
        lse,
        q.stride(0),
        q.stride(1),
        k_new.stride(0),
        k_new.stride(1),
        v_new.stride(0),
        v_new.stride(1),
        *k.stride()[:3],
        *v.stride()[:3],
        out.stride(0),
        out.stride(1),
        layer,
        seed,
        sm_scale,
        new_scale,
        v_scale,
        logits_soft_cap,
        window_left,
        heads,
        kv_heads,
        G=group,
        D=head_dim,
        DV=v_dim,
        GV=group_count(v_dim),
        PAGE=page_size,
        M=TILE_PAIRS,
        N=TILE_TOKENS,
        SOFT_CAP=logits_soft_cap > 0.0,
        WINDOW=window_left >= 0,
        SINK=sinks is not None,
        ALIBI=alibi_slopes is not None,
        MIXED=exact_index is not None,
        BYPASS=bypass,
        BP=max(16, triton.next_power_of_2(bypass)),
        P_DTYPE=weight_dtype(q.dtype),
        num_warps=NUM_WARPS,
        num_stages=1,
    )


@torch.library.custom_op("witcert::extend_meter", mutates_args=("out", "lse", "acc", "part_o", "part_m", "counter"))
def extend_meter_op(
    q_rows: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k: Tensor,
    v: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
    witness: Tensor | None,
    pass_ids: Tensor,
    head_ids: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    row_index: Tensor,
    row_request: Tensor,
    row_start: Tensor,
    row_limit: Tensor,
    row_position: Tensor,
    tail_len: Tensor,
    delta_loc: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    exact_index: Tensor | None,
    k_exact: Tensor | None,
    v_exact: Tensor | None,
    bypass_keep: Tensor | None,
    bypass_channels: Tensor | None,
    k_bypass: Tensor | None,
    out: Tensor,
    lse: Tensor,
    acc: Tensor,
    part_o: Tensor,
    part_m: Tensor,
    counter: Tensor,
    tail_splits: int,
    layer: int,
    seed: int,
    sm_scale: float,
    new_scale: float,
    v_scale: float,
    logits_soft_cap: float,
    window_left: int,
) -> None:
    """Rows ``row_index``: prefix splits, tail splits, merge into ``out``, ``lse`` and ``acc`` at those
    rows."""
    if q_rows.shape[0] == 0:
        return
    cache = PackedView(
        k,
        v,
        k_scales,
        v_scales,
        witness,
        pass_ids,
        head_ids,
        bypass_keep,
        bypass_channels,
        k_bypass,
        exact_index,
        k_exact,
        v_exact,
    )
    pages = Pages(kv_indptr, kv_indices, kv_last_page_len)
    rows = Rows(row_request, row_position, row_limit)
    prefix = Attention(layer, seed, sm_scale, v_scale, logits_soft_cap, window_left, 1)
    launch_decode_split(
        q_rows,
        cache,
        pages,
        prefix,
        delta_loc,
        part_o,
        part_m,
        splits=part_m.shape[2] - tail_splits,
        meter=True,
        alibi_slopes=alibi_slopes,
        rows=rows,
    )
    launch_tail_split(
        q_rows,
        k_new,
        v_new,
        row_start,
        row_limit,
        tail_len,
        part_o,
        part_m,
        Attention(layer, seed, new_scale, v_scale, logits_soft_cap, window_left, 1),
        splits=tail_splits,
        meter=True,
        alibi_slopes=alibi_slopes,
    )
    launch_merge(
        part_o,
        part_m,
        out,
        lse,
        acc,
        counter,
        pages,
        prefix,
        page_size=k.shape[1],
        v_dim=v.shape[3],
        meter=True,
        sinks=sinks,
        rows=rows,
        tail=Tail(row_index, tail_len),
    )


@extend_int8_op.register_fake
def _extend_int8_fake(*args: object, **kwargs: object) -> None:
    """Everything is written in place."""


@extend_meter_op.register_fake
def _extend_meter_fake(*args: object, **kwargs: object) -> None:
    """Everything is written in place."""
