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


def in_layout(k: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """A copy of ``[P, page_size, Hkv, D]`` tensors, as views of memory laid out as NHD, HND or one 5-D tensor."""
    if layout == "5D":
        k, v = torch.stack((k, v), dim=1).unbind(dim=1)
        return k, v
    if layout == "HND":
        k, v = (x.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3) for x in (k, v))
        return k, v
    return k.clone(), v.clone()


def rows_of(length: int, q_len: int = 1) -> dict[str, Any]:
    """The last ``q_len`` tokens of the first request, of ``length`` tokens, as rows of ``certify``."""
    position = torch.arange(length - q_len, length, dtype=torch.int32)
    return {"row_request": torch.zeros(q_len, dtype=torch.int32), "row_position": position}


def some_channels(head_dim: int, heads: int, pairs: int, generator: torch.Generator) -> Tensor:
    """Channels ``[heads, 2 pairs]`` of different rotary pairs, in the order of ``BypassedKeys``."""
    chosen = torch.stack([torch.randperm(head_dim // 2, generator=generator)[:pairs] for _ in range(heads)])
    return RotarySpec(head_dim).pair_channels()[chosen.sort(dim=1).values].flatten(1)
