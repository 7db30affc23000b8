"""The INT8 decode kernel: split pass and merge, nothing read back on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.kernels.device.arguments import Heads, Rows, Shape
from witcert_core.kernels.host import dispatch
from witcert_core.kernels.host.arguments import DitherOf, PackedCache, cap_of, window_of
from witcert_core.kernels.host.checks import seed_of
from witcert_core.kernels.host.launch import (
    NUM_WARPS,
    TILE_ROWS,
    TILE_TOKENS,
    Workspace,
    is_old,
    launch_merge,
    pages_of,
    weight_dtype,
)
from witcert_core.kernels.host.pages import PageTable
from witcert_core.meter.attention import AttentionSpec


@dataclass(frozen=True)
class TileShape:
    """What a program of the decode kernel takes at once, by what compiles without spills (``bench/static.md``).

    It follows from the call's own form alone: a row's bits do not depend on the batch it is in.
    """

    pairs: int
    digits: bool
    warps: int
    stages: int


def tile_shape(dtype: torch.dtype, pairs: int, old: bool) -> TileShape:
    """For queries of ``dtype`` and ``pairs`` (query row, head) of a request and KV head.

    ``old``: compute capability below 9. The meter's numbers per pair are halved where there are at most four; fp32
    queries are not met by two bytes.
    """
    if dtype == torch.float32:
        return TileShape(TILE_ROWS, False, NUM_WARPS, 1)
    few = pairs <= 4
    return TileShape(4 if few else TILE_ROWS, True, 2 if few else NUM_WARPS, 1 if old else 2)


def launch_decode_split(
    q: Tensor,
    cache: PackedCache,
    table: PageTable,
    dither: DitherOf,
    spec: AttentionSpec,
    delta_loc: Tensor,
    space: Workspace,
    *,
    splits: int,
    meter: bool,
    q_len: int = 1,
    rows: Rows | None = None,
    flag: Tensor | None = None,
) -> None:
    """Split pass of rows ``q [R, Hq, D]`` over INT8 pages: the first ``splits`` splits of the workspace."""
    from witcert_core.kernels.decode.triton import decode_split

    num_rows, heads = q.shape[:2]
    kv_heads = cache.k.shape[2]
    pairs = q_len * (heads // kv_heads)
    tile = tile_shape(q.dtype, pairs, is_old(q.device))
    dispatch.launch(
        decode_split,
        (num_rows // q_len * -(-pairs // tile.pairs), kv_heads, splits),
        Heads.of(q),
        cache.words(),
        pages_of(table),
        rows,
        delta_loc,
        flag,
        space.part_o,
        space.part_m,
        dither.layer,
        seed_of(dither.key),
        spec.sm_scale,
        cap_of(spec),
        window_of(spec),
        q_len,
        space.part_m.shape[2],
        heads,
        kv_heads,
        SHAPE=Shape.of(
            q,
            cache.v,
            page_size=cache.page_size,
            pairs=tile.pairs,
            tokens=TILE_TOKENS,
            weights=weight_dtype(q.dtype),
            bypass=cache.bypassed,
            digits=tile.digits,
        ),
        METER=meter,
        MULTI=q_len > 1,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def launch_decode(
    q: Tensor,
    cache: PackedCache,
    table: PageTable,
    dither: DitherOf,
    spec: AttentionSpec,
    delta_loc: Tensor,
    space: Workspace,
    out: Tensor,
    lse: Tensor,
    acc: Tensor | None,
    *,
    q_len: int,
    flag: Tensor | None,
    counter: Tensor | None,
) -> None:
    """Attend rows ``q [R, Hq, D]`` into ``out`` and ``lse``, and measure them where there is an ``acc``."""
    splits = space.part_m.shape[2]
    launch_decode_split(
        q,
        cache,
        table,
        dither,
        spec,
        delta_loc,
        space,
        splits=splits,
        meter=acc is not None,
        q_len=q_len,
        flag=flag,
    )
    launch_merge(
        space.part_o,
        space.part_m,
        out,
        lse,
        acc,
        table,
        spec,
        page_size=cache.page_size,
        q_len=q_len,
        flag=flag,
        counter=counter,
    )
