"""Custom op of the INT8 decode kernel: split pass and merge, nothing read back on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.dither import num_groups
from witcert_core.kernels.common import slack
from witcert_core.kernels.common.backend import weights_are_cast

NUM_WARPS = 8
TILE_ROWS = 8
"""Query rows of a tile, fixed for bitwise invariance: the least that tensor cores take."""
MERGE_BLOCK = 16


def tile_tokens(device: torch.device) -> tuple[int, int]:
    """Tokens of a tile and pipeline stages, by what compiles without spills (``bench/static.md``)."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 9:
        return 32, 1
    return slack.TILE_TOKENS, 2


def weight_dtype(compute: torch.dtype) -> object:
    """Triton dtype in which weights meet V: fp32 for fp32, else bf16, whose range fits ``p * s``.

    The interpreter has no sound bf16 dot; it keeps fp32.
    """
    import triton.language as tl

    return tl.bfloat16 if weights_are_cast(compute) else tl.float32


@torch.library.custom_op("witcert::decode_int8", mutates_args=("out", "lse", "acc", "part_o", "part_m", "counter"))
def decode_int8_op(
    q: Tensor,
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
    delta_loc: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    flag: Tensor | None,
    exact_index: Tensor | None,
    k_exact: Tensor | None,
    v_exact: Tensor | None,
    out: Tensor,
    lse: Tensor,
    acc: Tensor,
    part_o: Tensor,
    part_m: Tensor,
    counter: Tensor,
    layer: int,
    seed: int,
    sm_scale: float,
    v_scale: float,
    logits_soft_cap: float,
    window_left: int,
    q_len: int,
    meter: bool,
    run_if: int,
) -> None:
    """K and V as ``[P, page_size, Hkv, D]`` views; workspaces ``part_o [R, H, splits, Dv]``, ``part_m [..,
    16]``."""
    import triton

    from witcert_core.kernels.common.merge import merge_splits
    from witcert_core.kernels.decode.triton import decode_split

    num_rows, heads, head_dim = q.shape
    kv_heads, page_size, v_dim = k.shape[2], k.shape[1], v.shape[3]
    group, num_splits = heads // kv_heads, part_o.shape[2]
    requests = num_rows // q_len
    m_tiles = -(-q_len * group // TILE_ROWS)
    tokens, stages = tile_tokens(q.device)
    window = window_left >= 0
    side = k_scales if witness is None else witness
    if num_rows == 0 or num_splits == 0:
        return
    k_words, v_words = k.view(torch.int32), v.view(torch.int32)
    decode_split[(requests * m_tiles, kv_heads, num_splits)](
        q,
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
        kv_indptr,
        kv_indptr,
        kv_indptr,
        delta_loc,
        q if alibi_slopes is None else alibi_slopes,
        kv_indptr if flag is None else flag,
        kv_indptr if exact_index is None else exact_index,
        q if k_exact is None else k_exact,
        q if v_exact is None else v_exact,
        part_o,
        part_m,
        q.stride(0),
        q.stride(1),
        *k_words.stride()[:3],
        *v_words.stride()[:3],
        layer,
        seed,
        sm_scale,
        logits_soft_cap,
        window_left,
        q_len,
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
        METER=meter,
        WITNESS=witness is not None,
        SOFT_CAP=logits_soft_cap > 0.0,
        WINDOW=window,
        ALIBI=alibi_slopes is not None,
        ROWS=False,
        MULTI=q_len > 1,
        FLAG=run_if,
        MIXED=exact_index is not None,
        P_DTYPE=weight_dtype(q.dtype),
        DOT_ERROR=slack.int8_dot_error(num_groups(head_dim)),
        EXACT_DOT_ERROR=slack.dot_error(head_dim),
        num_warps=NUM_WARPS,
        num_stages=stages,
    )
    merge_splits[(num_rows, heads)](
        part_o,
        part_m,
        out,
        lse,
        acc,
        lse,
        q if sinks is None else sinks,
        kv_indptr,
        kv_last_page_len,
        kv_indptr,
        kv_indptr,
        kv_indptr,
        kv_indptr,
        kv_indptr,
        kv_indptr if flag is None else flag,
        counter,
        out.stride(0),
        out.stride(1),
        v_scale,
        window_left,
        q_len,
        num_splits,
        heads,
        DV=v_dim,
        DV_PAD=triton.next_power_of_2(v_dim),
        PAGE=page_size,
        SPLIT=slack.SPLIT_TOKENS,
        BLOCK=MERGE_BLOCK,
        METER=meter,
        SINK=sinks is not None,
        WINDOW=window,
        ROWS=False,
        FLAG=run_if,
        STORE_OUT=True,
        OMEGA=False,
        TAIL=False,
        num_warps=4,
    )


@decode_int8_op.register_fake
def _decode_int8_fake(*args: object, **kwargs: object) -> None:
    """Everything is written in place."""
