"""FlashInfer's page tables and paged caches, checked once on the host and read by strides on the device.

Shapes: P pages of ``page_size`` tokens, Hkv KV heads, D channels, Gr = ceil(D / 32) groups, B requests.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.quantizers.dither import num_groups

PagedKV = tuple[Tensor, Tensor]
"""K ``[P, page_size, Hkv, D]`` and V ``[P, page_size, Hkv, Dv]`` (NHD); a cache laid out as HND is a permuted view."""


def check_paged(cache: PagedKV) -> None:
    """Raise unless K and V are 4-D, agree but for the channels, and these are adjacent."""
    k, v = cache
    if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
        raise InputError(f"K {tuple(k.shape)} and V {tuple(v.shape)} must be 4-D and agree but for the channels")
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        raise InputError("the channels of a token must lie side by side in memory (last stride 1)")


def check_side(name: str, side: Tensor, pages: Tensor, last: int, dtype: torch.dtype) -> None:
    """A side tensor must be contiguous ``[P, page_size, Hkv, last]`` of ``dtype``, whatever the cache's strides."""
    want = (*pages.shape[:3], last)
    if tuple(side.shape) != want or side.dtype != dtype or not side.is_contiguous():
        raise InputError(
            f"{name} is {side.dtype} {tuple(side.shape)} with strides {side.stride()}; "
            f"it must be contiguous {dtype} {want}"
        )


@dataclass(frozen=True)
class PageTable:
    """Pages of ``B`` requests (``kv_indptr``, ``kv_indices``, ``kv_last_page_len``).

    int32 ``indptr [B + 1]``, ``indices``, ``last_page_len [B]``.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor

    def __post_init__(self) -> None:
        for name, tensor in (
            ("kv_indptr", self.indptr),
            ("kv_indices", self.indices),
            ("kv_last_page_len", self.last_page_len),
        ):
            if tensor.dtype != torch.int32 or tensor.dim() != 1 or not tensor.is_contiguous():
                raise InputError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be contiguous int32, 1-D")
        if self.indptr.numel() != self.last_page_len.numel() + 1:
            raise InputError(
                f"kv_indptr has {self.indptr.numel()} entries for {self.last_page_len.numel()} requests; "
                "it must have one more than there are requests"
            )

    @property
    def batch_size(self) -> int:
        return self.last_page_len.numel()

    def lengths(self, page_size: int) -> list[int]:
        """Tokens of each request; on the host (synchronises)."""
        starts, last = self.indptr.tolist(), self.last_page_len.tolist()
        pages = [end - start for start, end in itertools.pairwise(starts)]
        return [(n - 1) * page_size + tail if n else 0 for n, tail in zip(pages, last, strict=True)]

    def slots(self, request: int, length: int, page_size: int) -> Tensor:
        """int64 ``[length]`` slot ``page * page_size + offset`` of each token of one request."""
        first = int(self.indptr[request])
        position = torch.arange(length, device=self.indices.device)
        page = self.indices[first + position // page_size].to(torch.int64)
        return page * page_size + position % page_size


def gather(side: Tensor, slots: Tensor) -> Tensor:
    """What ``side [P, page_size, Hkv, X]`` has at ``slots [S]``, ``[S, Hkv, X]``."""
    page_size = side.shape[1]
    return side[slots // page_size, slots % page_size]


def check_int8_cache(k: Tensor, v: Tensor, k_scales: Tensor, v_scales: Tensor) -> None:
    """Raise unless codes are int8 and their scales fp16 ``[P, page_size, Hkv, Gr]``."""
    check_paged((k, v))
    if k.dtype != torch.int8 or v.dtype != torch.int8:
        raise InputError(f"the packed cache is {k.dtype} and {v.dtype}; codes are torch.int8")
    # Also the channels: kernels read four codes of V as a word.
    if any(n % 4 for n in (*v.stride()[:3], v.shape[3], v.storage_offset())):
        raise InputError(
            f"V codes have strides {v.stride()}, {v.shape[3]} channels and begin {v.storage_offset()} bytes into their "
            "memory; all but the last stride must be multiples of 4"
        )
    check_side("k_scales", k_scales, k, num_groups(k.shape[-1]), torch.float16)
    check_side("v_scales", v_scales, v, num_groups(v.shape[-1]), torch.float16)
