"""Custom op that repairs pages; the tag is set by the second of two launches, when both K and V are in
place."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024


@torch.library.custom_op("witcert::repair_pages", mutates_args=("index", "k", "v"))
def repair_pages_op(
    index: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    heads: Tensor,
    entries: Tensor,
    exact_k: Tensor,
    exact_v: Tensor,
) -> None:
    """``pages``, ``heads``, ``entries`` int32 ``[n]``; ``exact_k``, ``exact_v`` ``[n, page_size, D]``."""
    from witcert_core.kernels.repair.triton import repair_kernel

    if pages.numel() == 0:
        return
    for source, pool, tag in ((exact_k, k, False), (exact_v, v, True)):
        size = pool.shape[1] * pool.shape[2]
        repair_kernel[(pages.numel(), -(-size // BLOCK))](
            pages,
            heads,
            entries,
            source,
            pool,
            index,
            index.shape[1],
            SIZE=size,
            BLOCK=BLOCK,
            TAG=tag,
            num_warps=4,
        )


@repair_pages_op.register_fake
def _repair_pages_fake(*args: object, **kwargs: object) -> None:
    """Everything is written in place."""
