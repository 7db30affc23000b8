"""Custom ops of the extend step: attention of all rows, and the metered pass of the rows asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.dither import num_groups
from witcert_core.kernels.common import slack
from witcert_core.kernels.decode.launch import MERGE_BLOCK, NUM_WARPS, TILE_ROWS, tile_tokens, weight_dtype

TILE_PAIRS = 64
TILE_KEYS = 32


@torch.library.custom_op("witcert::extend_int8", mutates_args=("out", "lse"))
def extend_int8_op(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k: Tensor,
    v: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
    row_ids: Tensor,
    head_ids: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    sinks: Tensor | None,
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
    from witcert_core.kernels.extend.triton import extend_attention

    heads, head_dim = q.shape[1:]
    kv_heads, page_size, v_dim = k.shape[2], k.shape[1], v.shape[3]
    group, requests = heads // kv_heads, qo_indptr.numel() - 1
    if q.shape[0] == 0 or max_q_len == 0:
        return
    k_words, v_words = k.view(torch.int32), v.view(torch.int32)
    extend_attention[(-(-max_q_len * group // TILE_PAIRS), kv_heads, requests)](
        q,
        k_new,
        v_new,
        k_words,
        v_words,
        k_scales,
        v_scales,
        row_ids,
        head_ids,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_last_page_len,
        lse if sinks is None else sinks,
        out,
        lse,
        q.stride(0),
        q.stride(1),
        k_new.stride(0),
        k_new.stride(1),
        v_new.stride(0),
        v_new.stride(1),
        *k_words.stride()[:3],
        *v_words.stride()[:3],
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
        PAGE=page_size,
        M=TILE_PAIRS,
        N=TILE_KEYS,
        SOFT_CAP=logits_soft_cap > 0.0,
        WINDOW=window_left >= 0,
        SINK=sinks is not None,
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
    row_ids: Tensor,
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
    import triton

    from witcert_core.kernels.common.merge import merge_splits
    from witcert_core.kernels.decode.triton import decode_split
    from witcert_core.kernels.extend.triton import tail_split

    num_rows, heads, head_dim = q_rows.shape
    kv_heads, page_size, v_dim = k.shape[2], k.shape[1], v.shape[3]
    group, num_splits = heads // kv_heads, part_o.shape[2]
    if num_rows == 0:
        return
    m_tiles = -(-group // TILE_ROWS)
    tokens, stages = tile_tokens(q_rows.device)
    k_words, v_words = k.view(torch.int32), v.view(torch.int32)
    window = window_left >= 0
    side = k_scales if witness is None else witness
    decode_split[(num_rows * m_tiles, kv_heads, num_splits - tail_splits)](
        q_rows,
        k_words,
        v_words,
        k_scales,
        v_scales,
        side,
        row_ids,
        head_ids,
        kv_indptr,
        kv_indices,
        kv_last_page_len,
        row_request,
        row_position,
        row_limit,
        delta_loc,
        q_rows,
        kv_indptr,
        kv_indptr,
        q_rows,
        q_rows,
        part_o,
        part_m,
        q_rows.stride(0),
        q_rows.stride(1),
        *k_words.stride()[:3],
        *v_words.stride()[:3],
        layer,
        seed,
        sm_scale,
        logits_soft_cap,
        window_left,
        1,
        num_splits,
        heads,
        kv_heads,
        G=group,
        D=head_dim,
        DV=v_dim,
        PAGE=page_size,
        M=TILE_ROWS,
        N=tokens,
        SPLIT=slack.SPLIT_TOKENS,
        METER=True,
        WITNESS=witness is not None,
        SOFT_CAP=logits_soft_cap > 0.0,
        WINDOW=window,
        ALIBI=False,
        ROWS=True,
        MULTI=False,
        FLAG=0,
        MIXED=False,
        P_DTYPE=weight_dtype(q_rows.dtype),
        DOT_ERROR=slack.int8_dot_error(num_groups(head_dim)),
        EXACT_DOT_ERROR=slack.dot_error(head_dim),
        num_warps=NUM_WARPS,
        num_stages=stages,
    )
    tail_split[(num_rows, kv_heads, tail_splits)](
        q_rows,
        k_new,
        v_new,
        row_start,
        row_limit,
        tail_len,
        part_o,
        part_m,
        q_rows.stride(0),
        q_rows.stride(1),
        k_new.stride(0),
        k_new.stride(1),
        v_new.stride(0),
        v_new.stride(1),
        new_scale,
        1.0 / v_scale,
        logits_soft_cap,
        window_left,
        num_splits,
        heads,
        G=group,
        D=head_dim,
        DV=v_dim,
        M=max(TILE_ROWS, triton.next_power_of_2(group)),
        N=TILE_KEYS,
        SPLIT=slack.SPLIT_TOKENS,
        SOFT_CAP=logits_soft_cap > 0.0,
        WINDOW=window,
        METER=True,
        P_DTYPE=weight_dtype(q_rows.dtype),
        DOT_ERROR=slack.dot_error(head_dim),
        num_warps=NUM_WARPS,
        num_stages=1,
    )
    merge_splits[(num_rows, heads)](
        part_o,
        part_m,
        out,
        lse,
        acc,
        lse,
        q_rows if sinks is None else sinks,
        kv_indptr,
        kv_last_page_len,
        row_request,
        row_position,
        row_limit,
        row_index,
        tail_len,
        kv_indptr,
        counter,
        out.stride(0),
        out.stride(1),
        v_scale,
        window_left,
        1,
        num_splits,
        heads,
        DV=v_dim,
        DV_PAD=triton.next_power_of_2(v_dim),
        PAGE=page_size,
        SPLIT=slack.SPLIT_TOKENS,
        BLOCK=MERGE_BLOCK,
        METER=True,
        SINK=sinks is not None,
        WINDOW=window,
        ROWS=True,
        FLAG=0,
        STORE_OUT=True,
        OMEGA=False,
        TAIL=True,
        num_warps=4,
    )


@extend_int8_op.register_fake
def _extend_int8_fake(*args: object, **kwargs: object) -> None:
    """Everything is written in place."""


@extend_meter_op.register_fake
def _extend_meter_fake(*args: object, **kwargs: object) -> None:
    """Everything is written in place."""
