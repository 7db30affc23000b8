"""Pages whose exact K and V are kept in a side pool, and the tag that says so."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.errors import InputError


@dataclass(frozen=True)
class RepairedPages:
    """Which (page, KV head) pairs are exact, and where.

    Args:
        index: int32 ``[P, Hkv]`` entry of the side pool, -1 for a packed page.
        k: ``[X, page_size, D]`` exact keys in the dtype of the queries.
        v: ``[X, page_size, Dv]`` exact values.
    """

    index: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def allocate(
        cls,
        num_pages: int,
        num_kv_heads: int,
        capacity: int,
        page_size: int,
        head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> RepairedPages:
        """Nothing repaired yet, room for ``capacity`` pages of one head."""
        return cls(
            torch.full((num_pages, num_kv_heads), -1, dtype=torch.int32, device=device),
            torch.zeros(capacity, page_size, head_dim, dtype=dtype, device=device),
            torch.zeros(capacity, page_size, v_head_dim, dtype=dtype, device=device),
        )

    def check(self, pages: int, page_size: int, heads: int, head_dim: int, v_dim: int, dtype: torch.dtype) -> None:
        """Raise unless this fits a cache of those sizes and queries of that dtype."""
        shapes = (tuple(self.index.shape), tuple(self.k.shape[1:]), tuple(self.v.shape[1:]))
        want = ((pages, heads), (page_size, head_dim), (page_size, v_dim))
        if shapes != want or self.index.dtype != torch.int32 or self.k.shape[0] != self.v.shape[0]:
            raise InputError(f"repaired pages have index, K and V of {shapes}; they must be {want}, index int32")
        if self.k.dtype != dtype or self.v.dtype != dtype:
            raise InputError(f"repaired pages are {self.k.dtype} and {self.v.dtype}; queries are {dtype}")
        if not (self.index.is_contiguous() and self.k.is_contiguous() and self.v.is_contiguous()):
            raise InputError("the tensors of repaired pages must be contiguous")
