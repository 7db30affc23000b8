"""What the attention launches share: tile sizes, the workspace, and the merge of the splits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.kernels.device.arguments import Heads, Pages, Rows, Tail, power_of_two
from witcert_core.kernels.host import dispatch, slack
from witcert_core.kernels.host.arguments import window_of
from witcert_core.kernels.host.checks import splits_for
from witcert_core.kernels.host.pages import PageTable
from witcert_core.meter.attention import AttentionSpec

NUM_WARPS = 4
TILE_ROWS = 8
"""(Query row, head) pairs of a tile, whatever the batch: the least that tensor cores take."""
TILE_TOKENS = 32
"""Tokens of a tile: 64 spill or, with warp-group products, run slower (``bench/static.md``)."""


def is_old(device: torch.device) -> bool:
    """Whether the GPU is of a generation before Hopper, for which less fits in registers."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 9


def weight_dtype(compute: torch.dtype) -> object:
    """Triton dtype in which weights meet V: fp32 for fp32, else bf16, whose range fits ``p * s``.

    The interpreter has no sound bf16 dot; it keeps fp32.
    """
    import triton.language as tl

    return tl.bfloat16 if dispatch.weights_are_cast(compute) else tl.float32


def pages_of(table: PageTable) -> Pages:
    """A page table as kernels take it."""
    return Pages(table.indptr, table.indices, table.last_page_len)


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
        return cls.of_splits(rows, heads, v_dim, splits_for(max_kv_len), device)

    @classmethod
    def of_splits(cls, rows: int, heads: int, v_dim: int, splits: int, device: torch.device) -> Workspace:
        shape = (rows, heads, splits)
        return cls(
            torch.empty(*shape, v_dim, dtype=torch.float32, device=device),
            torch.empty(*shape, slack.META_FIELDS, dtype=torch.float32, device=device),
        )

    @property
    def capacity(self) -> int:
        """Longest request that fits."""
        return int(self.part_o.shape[2]) * slack.SPLIT_TOKENS


def launch_merge(
    part_o: Tensor | None,
    part_m: Tensor,
    out: Tensor | None,
    lse: Tensor,
    acc: Tensor | None,
    table: PageTable,
    spec: AttentionSpec,
    *,
    page_size: int,
    q_len: int = 1,
    rows: Rows | None = None,
    tail: Tail | None = None,
    omega: Tensor | None = None,
    flag: Tensor | None = None,
    counter: Tensor | None = None,
) -> None:
    """Merge splits ``part_o [R, Hq, splits, Dv]``, ``part_m [R, Hq, splits, 16]`` into those of ``out [R, Hq, Dv]``,
    ``lse [R, Hq]``, ``acc [R, Hq, 16]`` and ``omega [R, Hq]`` that are given."""
    from witcert_core.kernels.device.merge import merge_splits

    num_rows, heads, num_splits = part_m.shape[:3]
    v_dim = 1 if part_o is None else part_o.shape[3]
    dispatch.launch(
        merge_splits,
        (num_rows, heads),
        part_o,
        part_m,
        None if out is None else Heads.of(out),
        lse,
        acc,
        omega,
        spec.sinks,
        pages_of(table),
        rows,
        tail,
        flag,
        counter,
        window_of(spec),
        q_len,
        num_splits,
        heads,
        DV=v_dim,
        DV_PAD=power_of_two(v_dim),
        PAGE=page_size,
        num_warps=4,
    )
