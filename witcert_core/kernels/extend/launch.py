"""The extend step: attention of all rows, and the metered pass of the rows asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.kernels.decode.launch import launch_decode_split
from witcert_core.kernels.device.arguments import Heads, Rows, Shape, Tail, power_of_two
from witcert_core.kernels.host import dispatch
from witcert_core.kernels.host.arguments import DitherOf, PackedCache, cap_of, window_of
from witcert_core.kernels.host.checks import seed_of, splits_for
from witcert_core.kernels.host.launch import (
    NUM_WARPS,
    TILE_ROWS,
    TILE_TOKENS,
    Workspace,
    launch_merge,
    pages_of,
    weight_dtype,
)
from witcert_core.kernels.host.pages import PageTable
from witcert_core.meter.attention import AttentionSpec

TILE_PAIRS = 32


@dataclass(frozen=True)
class Chunk:
    """New tokens of B requests behind their stored prefixes.

    Args:
        q, k, v: ``[T, Hq, D]``, ``[T, Hkv, D]``, ``[T, Hkv, Dv]``.
        qo_indptr: int32 ``[B + 1]``, first row of each request.
        table: pages of the prefixes.
        max_q_len, max_kv_len: no chunk and no prefix is longer.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    qo_indptr: Tensor
    table: PageTable
    max_q_len: int
    max_kv_len: int


@dataclass(frozen=True)
class MeteredRows:
    """Rows of a chunk as the metered kernels take them.

    Args:
        paged: their requests, positions and prefix lengths.
        start: int32 ``[R]`` first new token of each row's request.
        tail: where each row's output goes, and how many new tokens it sees.
    """

    paged: Rows
    start: Tensor
    tail: Tail

    @classmethod
    def of(cls, chunk: Chunk, rows: Tensor, page_size: int) -> MeteredRows:
        """Of ``rows`` int32 ``[R]`` of the chunk; nothing is read back on the host."""
        request = torch.searchsorted(chunk.qo_indptr, rows, right=True, out_int32=True) - 1
        start = chunk.qo_indptr[request.to(torch.int64)]
        count = chunk.table.indptr[1:] - chunk.table.indptr[:-1]
        lengths = torch.where(count > 0, (count - 1) * page_size + chunk.table.last_page_len, 0)
        limit = lengths[request.to(torch.int64)].to(torch.int32)
        seen = rows - start + 1
        return cls(Rows(request, limit + seen - 1, limit), start, Tail(rows, seen))


def launch_extend(
    chunk: Chunk, cache: PackedCache, dither: DitherOf, spec: AttentionSpec, out: Tensor, lse: Tensor
) -> None:
    """All rows into ``out [T, Hq, Dv]`` and ``lse [T, Hq]``, unmetered."""
    from witcert_core.kernels.extend.triton import extend_attention

    heads, kv_heads = chunk.q.shape[1], cache.k.shape[2]
    blocks = -(-chunk.max_q_len * (heads // kv_heads) // TILE_PAIRS)
    dispatch.launch(
        extend_attention,
        (blocks if chunk.q.shape[0] else 0, kv_heads, chunk.table.batch_size),
        Heads.of(chunk.q),
        Heads.of(chunk.k),
        Heads.of(chunk.v),
        cache.words(),
        pages_of(chunk.table),
        chunk.qo_indptr,
        spec.sinks,
        Heads.of(out),
        lse,
        dither.layer,
        seed_of(dither.key),
        spec.sm_scale,
        cap_of(spec),
        window_of(spec),
        heads,
        kv_heads,
        SHAPE=Shape.of(
            chunk.q,
            chunk.v,
            page_size=cache.page_size,
            pairs=TILE_PAIRS,
            tokens=TILE_TOKENS,
            weights=weight_dtype(chunk.q.dtype),
            bypass=cache.bypassed,
        ),
        num_warps=NUM_WARPS,
        num_stages=1,
    )


def launch_tail_split(
    q: Tensor, chunk: Chunk, rows: MeteredRows, spec: AttentionSpec, space: Workspace, splits: int
) -> None:
    """Split pass of rows ``q [R, Hq, D]`` over the new tokens, in ``splits`` splits after those of the prefix."""
    from witcert_core.kernels.extend.triton import tail_split

    num_rows, heads = q.shape[:2]
    kv_heads = chunk.k.shape[1]
    dispatch.launch(
        tail_split,
        (num_rows, kv_heads, splits),
        Heads.of(q),
        Heads.of(chunk.k),
        Heads.of(chunk.v),
        rows.start,
        rows.paged.limit,
        rows.tail.length,
        space.part_o,
        space.part_m,
        spec.sm_scale,
        cap_of(spec),
        window_of(spec),
        space.part_m.shape[2],
        heads,
        SHAPE=Shape.of(
            q,
            chunk.v,
            page_size=1,
            pairs=max(TILE_ROWS, power_of_two(heads // kv_heads)),
            tokens=TILE_TOKENS,
            weights=weight_dtype(q.dtype),
        ),
        num_warps=NUM_WARPS,
        num_stages=1,
    )


def launch_extend_meter(
    chunk: Chunk,
    meter_rows: Tensor,
    cache: PackedCache,
    dither: DitherOf,
    spec: AttentionSpec,
    delta_loc: Tensor,
    out: Tensor,
    lse: Tensor,
    acc: Tensor,
) -> None:
    """Rows ``meter_rows`` int32 ``[R]`` once more: ``out`` and ``lse`` at those rows, and ``acc [R, Hq, 16]``."""
    rows = MeteredRows.of(chunk, meter_rows, cache.page_size)
    q = chunk.q[meter_rows.to(torch.int64)].contiguous()
    of_tail, of_prefix = splits_for(chunk.max_q_len), splits_for(chunk.max_kv_len)
    space = Workspace.of_splits(q.shape[0], q.shape[1], chunk.v.shape[2], of_prefix + of_tail, q.device)
    launch_decode_split(
        q, cache, chunk.table, dither, spec, delta_loc, space, splits=of_prefix, meter=True, rows=rows.paged
    )
    launch_tail_split(q, chunk, rows, spec, space, of_tail)
    launch_merge(
        space.part_o,
        space.part_m,
        out,
        lse,
        acc,
        chunk.table,
        spec,
        page_size=cache.page_size,
        rows=rows.paged,
        tail=rows.tail,
    )
