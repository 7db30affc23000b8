"""What the attention launches share: tile sizes, groups of arguments, and the merge of the splits.

A kernel argument that is absent gets some pointer of the right kind; a compile-time flag keeps it from being read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.kernels.host import slack
from witcert_core.kernels.host.backend import weights_are_cast

NUM_WARPS = 4
TILE_ROWS = 8
"""(Query row, head) pairs of a tile, whatever the batch: the least that tensor cores take."""
TILE_TOKENS = 32
"""Tokens of a tile: 64 spill or, with warp-group products, run slower (``bench/static.md``)."""
MERGE_BLOCK = 16


def is_old(device: torch.device) -> bool:
    """Whether the GPU is of a generation before Hopper, for which less fits in registers."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 9


def weight_dtype(compute: torch.dtype) -> object:
    """Triton dtype in which weights meet V: fp32 for fp32, else bf16, whose range fits ``p * s``.

    The interpreter has no sound bf16 dot; it keeps fp32.
    """
    import triton.language as tl

    return tl.bfloat16 if weights_are_cast(compute) else tl.float32


def scale_words(scales: Tensor) -> Tensor:
    """fp16 scales as the device's ``load_scales`` reads them: words of two where their number is even."""
    return scales.view(torch.int32) if scales.shape[-1] % 2 == 0 else scales


def witness_words(witness: Tensor) -> Tensor:
    """Group witnesses as the device's ``load_codes`` reads them: words of four where their number allows."""
    return witness.view(torch.int32) if witness.shape[-1] % 4 == 0 else witness


def group_count(channels: int) -> int:
    """Groups of 32 channels, rounded up to the power of two that a tile needs."""
    import triton

    return int(triton.next_power_of_2(-(-channels // 32)))


@dataclass(frozen=True)
class Pages:
    """A page table's three tensors."""

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


@dataclass(frozen=True)
class Rows:
    """int32 ``[R]`` each: rows that come one by one, with their request, position and number of paged tokens."""

    request: Tensor
    position: Tensor
    limit: Tensor


@dataclass(frozen=True)
class Tail:
    """int32 ``[R]`` each: row of the output, and tokens the row sees after its pages."""

    target: Tensor
    length: Tensor


@dataclass(frozen=True)
class PackedView:
    """INT8 pages as ``[P, page_size, Hkv, D]`` views, with what stands beside them.

    ``keep``, ``channels``, ``k_bypass``: the tensors of :class:`~witcert_core.kernels.host.bypass.BypassedKeys`;
    ``exact_index``, ``k_exact``, ``v_exact``: those of :class:`~witcert_core.kernels.repair.pages.RepairedPages`.
    """

    k: Tensor
    v: Tensor
    k_scales: Tensor
    v_scales: Tensor
    witness: Tensor | None
    pass_ids: Tensor
    head_ids: Tensor
    keep: Tensor | None
    channels: Tensor | None
    k_bypass: Tensor | None
    exact_index: Tensor | None
    k_exact: Tensor | None
    v_exact: Tensor | None

    @property
    def bypass(self) -> int:
        """Bypassed channels of a head."""
        return 0 if self.channels is None else int(self.channels.shape[1])


@dataclass(frozen=True)
class Attention:
    """Numbers of one attention call."""

    layer: int
    seed: int
    sm_scale: float
    v_scale: float
    logits_soft_cap: float
    window_left: int
    q_len: int


def launch_merge(
    part_o: Tensor,
    part_m: Tensor,
    out: Tensor,
    lse: Tensor,
    acc: Tensor,
    counter: Tensor,
    pages: Pages,
    call: Attention,
    *,
    page_size: int,
    v_dim: int,
    meter: bool,
    sinks: Tensor | None = None,
    rows: Rows | None = None,
    tail: Tail | None = None,
    omega: Tensor | None = None,
    flag: Tensor | None = None,
    run_if: int = 0,
    store_out: bool = True,
) -> None:
    """Merge splits ``[R, H, splits, ..]`` into ``out``, ``lse``, ``acc`` (and ``omega``)."""
    import triton

    from witcert_core.kernels.device.merge import merge_splits

    num_rows, heads, num_splits = part_m.shape[:3]
    some_int = pages.indptr
    merge_splits[(num_rows, heads)](
        part_o,
        part_m,
        out,
        lse,
        acc,
        lse if omega is None else omega,
        lse if sinks is None else sinks,
        pages.indptr,
        pages.last_page_len,
        some_int if rows is None else rows.request,
        some_int if rows is None else rows.position,
        some_int if rows is None else rows.limit,
        some_int if tail is None else tail.target,
        some_int if tail is None else tail.length,
        some_int if flag is None else flag,
        counter,
        out.stride(0),
        out.stride(1),
        call.v_scale,
        call.window_left,
        call.q_len,
        num_splits,
        heads,
        DV=v_dim,
        DV_PAD=triton.next_power_of_2(v_dim) if store_out else MERGE_BLOCK,
        PAGE=page_size,
        SPLIT=slack.SPLIT_TOKENS,
        BLOCK=MERGE_BLOCK,
        METER=meter,
        SINK=sinks is not None,
        WINDOW=call.window_left >= 0,
        ROWS=rows is not None,
        FLAG=run_if,
        STORE_OUT=store_out,
        OMEGA=omega is not None,
        TAIL=tail is not None,
        num_warps=4,
    )
