"""One shape of decode attention, and the memory that contestants read: random values, repeated, in pages at random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE = 32
"""Tokens of a page, which vLLM's kernel takes in multiples of 32."""
COLD_BYTES = 2**27
"""Bytes of codes that are read before any is read again: a model's layers do not share a cache either."""

Call = Callable[[int], object]
"""Attends the requests of one set."""


@dataclass(frozen=True)
class Case:
    """`batch` requests of `length` tokens, one query token each."""

    batch: int
    length: int
    head_dim: int
    kv_heads: int
    group: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def sets(self) -> int:
        """Caches that are read in turn."""
        return max(1, -(-COLD_BYTES // (self.tokens * 2 * self.head_dim)))

    @property
    def tokens(self) -> int:
        """Tokens times KV heads of one set."""
        return self.batch * self.length * self.kv_heads

    @property
    def requests(self) -> int:
        return self.sets * self.batch

    @property
    def pages(self) -> int:
        """Of a request."""
        return self.length // PAGE

    def queries(self, dtype: torch.dtype) -> Tensor:
        """``[batch, Hq, D]``."""
        return torch.randn(self.batch, self.heads, self.head_dim, generator=generator()).to(dtype)

    def page_ids(self) -> Tensor:
        """Which pages of the pool are whose: int32 ``[sets, batch, pages]``."""
        total = self.requests * self.pages
        return torch.randperm(total, generator=generator()).to(torch.int32).reshape(self.sets, self.batch, self.pages)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def filled(shape: tuple[int, ...], make: Callable[[int], Tensor]) -> Tensor:
    """A tensor of random numbers that repeat after a million: filling must not take longer than reading."""
    block = make(2**20)
    out = torch.empty(shape, dtype=block.dtype)
    flat = out.view(-1)
    for begin in range(0, flat.numel(), block.numel()):
        part = flat[begin : begin + block.numel()]
        part.copy_(block[: part.numel()])
    return out


def normal(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Of mean 0 and deviation 1."""
    return filled(shape, lambda n: torch.randn(n, generator=generator()).to(dtype))
