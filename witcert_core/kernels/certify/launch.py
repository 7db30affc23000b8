"""Custom op of the certificate kernel: split pass and merge, nothing read back on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.kernels.host import slack
from witcert_core.kernels.host.launch import TILE_ROWS, Attention, Pages, Rows, group_count, launch_merge, scale_words

NUM_WARPS = 8
NUM_STAGES = 1
TILE_TOKENS = 32


@torch.library.custom_op("witcert::certify", mutates_args=("acc", "omega", "lse", "part_m", "counter"))
def certify_op(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    witness: Tensor,
    value_witness: Tensor | None,
    channel_band: Tensor,
    steps: Tensor | None,
    delta_loc: Tensor | None,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    row_request: Tensor | None,
    row_position: Tensor | None,
    row_limit: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    flag: Tensor | None,
    acc: Tensor,
    omega: Tensor,
    lse: Tensor,
    part_m: Tensor,
    counter: Tensor,
    num_bands: int,
    sm_scale: float,
    v_scale: float,
    logits_soft_cap: float,
    engine_constant: float,
    window_left: int,
    q_len: int,
) -> None:
    """K and V as ``[P, page_size, Hkv, D]`` views; workspace ``part_m [R, H, splits, 16]``."""
    import triton

    from witcert_core.kernels.certify.triton import certify_split

    num_rows, heads, head_dim = q.shape
    kv_heads, page_size = k.shape[2], k.shape[1]
    values = k if v is None else v
    v_dim, group, num_splits = values.shape[3], heads // kv_heads, part_m.shape[2]
    if num_rows == 0:
        return
    m_tiles = -(-q_len * group // TILE_ROWS)
    any_int = kv_indptr
    rows = None
    if row_request is not None and row_position is not None and row_limit is not None:
        rows = Rows(row_request, row_position, row_limit)
    run_if = 0 if flag is None else 1
    certify_split[(num_rows // q_len * m_tiles, kv_heads, num_splits)](
        q,
        k,
        values,
        witness,
        witness if value_witness is None else value_witness,
        channel_band,
        any_int if steps is None else scale_words(steps),
        omega if delta_loc is None else delta_loc,
        kv_indptr,
        kv_indices,
        kv_last_page_len,
        any_int if rows is None else rows.request,
        any_int if rows is None else rows.position,
        any_int if rows is None else rows.limit,
        omega if alibi_slopes is None else alibi_slopes,
        any_int if flag is None else flag,
        part_m,
        q.stride(0),
        q.stride(1),
        *k.stride()[:3],
        *values.stride()[:3],
        sm_scale,
        logits_soft_cap,
        engine_constant,
        window_left,
        q_len,
        num_splits,
        heads,
        kv_heads,
        G=group,
        D=head_dim,
        DV=v_dim,
        GV=group_count(v_dim),
        PAGE=page_size,
        B=num_bands,
        BP=max(16, triton.next_power_of_2(num_bands)),
        M=TILE_ROWS,
        N=TILE_TOKENS,
        SPLIT=slack.SPLIT_TOKENS,
        VALUES=v is not None,
        STEPS=steps is not None,
        SOFT_CAP=logits_soft_cap > 0.0,
        WINDOW=window_left >= 0,
        ALIBI=alibi_slopes is not None,
        ROWS=rows is not None,
        MULTI=q_len > 1,
        FLAG=run_if,
        DOT_ERROR=slack.dot_error(head_dim),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    launch_merge(
        part_m,
        part_m,
        lse,
        lse,
        acc,
        counter,
        Pages(kv_indptr, kv_indices, kv_last_page_len),
        Attention(0, 0, sm_scale, v_scale, logits_soft_cap, window_left, q_len),
        page_size=page_size,
        v_dim=v_dim,
        meter=True,
        sinks=sinks,
        rows=rows,
        omega=omega,
        flag=flag,
        run_if=run_if,
        store_out=False,
    )


@certify_op.register_fake
def _certify_fake(*args: object, **kwargs: object) -> None:
    """Everything is written in place."""
