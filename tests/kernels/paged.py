"""Page tables with pages in random order and some left over, and the layouts a cache may come in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from witcert_core.kernels.host.pages import PageTable
from witcert_core.quantizers.rotary import RotarySpec


def page_table(
    lengths: tuple[int, ...], page_size: int, generator: torch.Generator, spare: int = 2
) -> tuple[PageTable, int]:
    """The table of requests of ``lengths`` tokens, and the pages of a pool that holds ``spare`` more."""
    pages = [-(-n // page_size) for n in lengths]
    total = sum(pages) + spare
    order = torch.randperm(total, generator=generator).to(torch.int32)
    table = PageTable(
        torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()], dtype=torch.int32),
        order[: sum(pages)].contiguous(),
        torch.tensor([(n - 1) % page_size + 1 if n else 0 for n in lengths], dtype=torch.int32),
    )
    return table, total


def in_layout(k: Tensor, v: Tensor, layout: str) -> Any:
    """A copy of ``[P, page_size, Hkv, D]`` tensors as NHD or HND pairs, or as one 5-D tensor."""
    if layout == "5D":
        return torch.stack((k, v), dim=1)
    if layout == "HND":
        return tuple(x.permute(0, 2, 1, 3).contiguous() for x in (k, v))
    return k.clone(), v.clone()


def from_layout(cache: Any, layout: str) -> tuple[Tensor, Tensor]:
    """Views ``[P, page_size, Hkv, D]`` of what :func:`in_layout` made."""
    k, v = cache.unbind(dim=1) if layout == "5D" else cache
    return (k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)) if layout == "HND" else (k, v)


def layout_name(layout: str) -> str:
    """``kv_layout`` of the operations."""
    return "HND" if layout == "HND" else "NHD"


def some_channels(head_dim: int, heads: int, pairs: int, generator: torch.Generator) -> Tensor:
    """Channels ``[heads, 2 pairs]`` of different rotary pairs, in the order of ``BypassedKeys``."""
    chosen = torch.stack([torch.randperm(head_dim // 2, generator=generator)[:pairs] for _ in range(heads)])
    return RotarySpec(head_dim).pair_channels()[chosen.sort(dim=1).values].flatten(1)
