"""Custom op of the INT8 decode kernel: split pass and merge, nothing read back on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.kernels.host import slack
from witcert_core.kernels.host.launch import (
    NUM_WARPS,
    TILE_ROWS,
    TILE_TOKENS,
    Attention,
    PackedView,
    Pages,
    Rows,
    group_count,
    is_old,
    launch_merge,
    scale_words,
    weight_dtype,
    witness_words,
)
from witcert_core.quantizers.dither import num_groups


@dataclass(frozen=True)
class TileShape:
    """What a program of the decode kernel takes at once, by what compiles without spills (``bench/static.md``).

    It follows from the call's own form alone: a row's bits do not depend on the batch it is in.
    """

    pairs: int
    tokens: int
    digits: bool
    warps: int
    stages: int


def tile_shape(dtype: torch.dtype, pairs: int, mixed: bool, old: bool) -> TileShape:
    """For queries of ``dtype``, ``pairs`` (query row, head) of a request and KV head, and whether pages may be exact.

    ``old``: compute capability below 9. The meter's numbers per pair are halved where there are at most four; fp32
    queries are not met by two bytes.
    """
    few = pairs <= 4
    stages = 1 if old or (mixed and not few) else 2
    if dtype == torch.float32:
        return TileShape(TILE_ROWS, TILE_TOKENS, False, NUM_WARPS, 1)
    return TileShape(4 if few else TILE_ROWS, TILE_TOKENS, True, 2 if few and not mixed else NUM_WARPS, stages)


def launch_decode_split(
    q: Tensor,
    cache: PackedView,
    pages: Pages,
    call: Attention,
    delta_loc: Tensor,
    part_o: Tensor,
    part_m: Tensor,
    *,
    splits: int,
    meter: bool,
    alibi_slopes: Tensor | None = None,
    rows: Rows | None = None,
    flag: Tensor | None = None,
    run_if: int = 0,
) -> None:
    """Split pass of rows ``q [R, Hq, D]`` over INT8 pages: the first ``splits`` splits of the workspace."""
    import triton

    from witcert_core.kernels.decode.triton import decode_split

    num_rows, heads, head_dim = q.shape
    k, v = cache.k, cache.v
    kv_heads, page_size, v_dim = k.shape[2], k.shape[1], v.shape[3]
    group = heads // kv_heads
    some_int, some_key = pages.indptr, q
    shape = tile_shape(q.dtype, call.q_len * group, cache.exact_index is not None, is_old(q.device))
    decode_split[(num_rows // call.q_len * -(-call.q_len * group // shape.pairs), kv_heads, splits)](
        q,
        k,
        v,
        scale_words(cache.k_scales),
        cache.v_scales,
        cache.k_scales if cache.witness is None else witness_words(cache.witness),
        cache.pass_ids,
        cache.head_ids,
        pages.indptr,
        pages.indices,
        pages.last_page_len,
        some_int if rows is None else rows.request,
        some_int if rows is None else rows.position,
        some_int if rows is None else rows.limit,
        delta_loc,
        delta_loc if alibi_slopes is None else alibi_slopes,
        some_int if flag is None else flag,
        some_int if cache.exact_index is None else cache.exact_index,
        some_key if cache.k_exact is None else cache.k_exact,
        some_key if cache.v_exact is None else cache.v_exact,
        some_int if cache.keep is None else cache.keep,
        some_int if cache.channels is None else cache.channels,
        some_key if cache.k_bypass is None else cache.k_bypass,
        part_o,
        part_m,
        q.stride(0),
        q.stride(1),
        *k.stride()[:3],
        *v.stride()[:3],
        call.layer,
        call.seed,
        call.sm_scale,
        call.logits_soft_cap,
        call.window_left,
        call.q_len,
        part_m.shape[2],
        heads,
        kv_heads,
        G=group,
        D=head_dim,
        DV=v_dim,
        GV=group_count(v_dim),
        PAGE=page_size,
        M=shape.pairs,
        N=shape.tokens,
        SPLIT=slack.SPLIT_TOKENS,
        METER=meter,
        WITNESS=cache.witness is not None,
        SOFT_CAP=call.logits_soft_cap > 0.0,
        WINDOW=call.window_left >= 0,
        ALIBI=alibi_slopes is not None,
        ROWS=rows is not None,
        MULTI=call.q_len > 1,
        FLAG=run_if,
        MIXED=cache.exact_index is not None,
        BYPASS=cache.bypass,
        BP=max(16, triton.next_power_of_2(cache.bypass)),
        DIGITS=shape.digits,
        P_DTYPE=weight_dtype(q.dtype),
        DOT_ERROR=slack.int8_dot_error(num_groups(head_dim)),
        EXACT_DOT_ERROR=slack.dot_error(head_dim),
        BYPASS_DOT_ERROR=slack.dot_error(cache.bypass + 1),
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


@torch.library.custom_op("witcert::decode_int8", mutates_args=("out", "lse", "acc", "part_o", "part_m", "counter"))
def decode_int8_op(
    q: Tensor,
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
    delta_loc: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    flag: Tensor | None,
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
    num_splits = part_o.shape[2]
    if q.shape[0] == 0 or num_splits == 0:
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
    call = Attention(layer, seed, sm_scale, v_scale, logits_soft_cap, window_left, q_len)
    launch_decode_split(
        q,
        cache,
        pages,
        call,
        delta_loc,
        part_o,
        part_m,
        splits=num_splits,
        meter=meter,
        alibi_slopes=alibi_slopes,
        flag=flag,
        run_if=run_if,
    )
    launch_merge(
        part_o,
        part_m,
        out,
        lse,
        acc,
        counter,
        pages,
        call,
        page_size=k.shape[1],
        v_dim=v.shape[3],
        meter=meter,
        sinks=sinks,
        flag=flag,
        run_if=run_if,
    )


@decode_int8_op.register_fake
def _decode_int8_fake(*args: object, **kwargs: object) -> None:
    """Everything is written in place."""
