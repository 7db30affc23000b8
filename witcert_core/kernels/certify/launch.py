"""The certificate kernel: split pass and merge, nothing read back on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.kernels.device.arguments import Heads, Rows, Shape, Slots, power_of_two
from witcert_core.kernels.host import dispatch, slack
from witcert_core.kernels.host.arguments import cap_of, scale_words, window_of
from witcert_core.kernels.host.launch import TILE_ROWS, launch_merge, pages_of
from witcert_core.kernels.host.pages import PageTable
from witcert_core.meter.attention import AttentionSpec

NUM_WARPS = 8
NUM_STAGES = 1
TILE_TOKENS = 32


def launch_certify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    witness: Tensor,
    value_witness: Tensor | None,
    channel_band: Tensor,
    num_bands: int,
    steps: Tensor | None,
    delta_loc: Tensor | None,
    table: PageTable,
    rows: Rows,
    spec: AttentionSpec,
    engine_constant: float,
    splits: int,
    acc: Tensor,
    omega: Tensor,
    lse: Tensor,
) -> None:
    """Rows ``q [R, Hq, D]`` over pools ``[P, page_size, Hkv, D]`` into ``acc [R, Hq, 16]``, ``omega`` and ``lse``."""
    from witcert_core.kernels.certify.triton import certify_split

    num_rows, heads = q.shape[:2]
    kv_heads, page_size = k.shape[2], k.shape[1]
    part_m = torch.empty(num_rows, heads, splits, slack.META_FIELDS, dtype=torch.float32, device=q.device)
    dispatch.launch(
        certify_split,
        (num_rows * -(-(heads // kv_heads) // TILE_ROWS), kv_heads, splits),
        Heads.of(q),
        Slots.of(k),
        Slots.of(v),
        witness,
        value_witness,
        channel_band,
        None if steps is None else scale_words(steps),
        delta_loc,
        pages_of(table),
        rows,
        part_m,
        spec.sm_scale,
        cap_of(spec),
        engine_constant,
        window_of(spec),
        splits,
        heads,
        kv_heads,
        SHAPE=Shape.of(q, v, page_size=page_size, pairs=TILE_ROWS, tokens=TILE_TOKENS, weights=None),
        B=num_bands,
        BP=max(16, power_of_two(num_bands)),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    launch_merge(None, part_m, None, lse, acc, table, spec, page_size=page_size, rows=rows, omega=omega)
