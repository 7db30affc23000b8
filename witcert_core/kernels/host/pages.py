"""FlashInfer's page tables and cache layouts, checked once on the host and read by strides on the device.

Shapes: P pages of ``page_size`` tokens, Hkv KV heads, D channels, Gr = ceil(D / 32) groups, B requests.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.quantizers.dither import num_groups

LAYOUTS = ("NHD", "HND")
PagedKV = Tensor | tuple[Tensor, Tensor]


def split_cache(cache: PagedKV, kv_layout: str) -> tuple[Tensor, Tensor]:
    """K and V as ``[P, page_size, Hkv, D]`` views, whatever the layout.

    Args:
        cache: a tuple of two 4-D tensors or one 5-D tensor ``[P, 2, ...]``.
        kv_layout: ``NHD`` (``[P, page_size, Hkv, D]``) or ``HND`` (``[P, Hkv, page_size, D]``).
    """
    if kv_layout not in LAYOUTS:
        raise InputError(f"kv_layout is {kv_layout!r}; allowed are {', '.join(LAYOUTS)}")
    if isinstance(cache, Tensor):
        if cache.dim() != 5 or cache.shape[1] != 2:
            raise InputError(f"a cache in one tensor is [P, 2, ...] in 5 dimensions, not {tuple(cache.shape)}")
        k, v = cache.unbind(dim=1)
    else:
        k, v = cache
    if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
        raise InputError(f"K {tuple(k.shape)} and V {tuple(v.shape)} must be 4-D and agree but for the channels")
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        raise InputError("the channels of a token must lie side by side in memory (last stride 1)")
    return (k, v) if kv_layout == "NHD" else (k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3))


def check_side(name: str, side: Tensor, pages: Tensor, last: int, dtype: torch.dtype) -> None:
    """A side tensor must be contiguous ``[P, page_size, Hkv, last]`` of ``dtype``, whatever the cache's
    layout."""
    want = (*pages.shape[:3], last)
    if tuple(side.shape) != want or side.dtype != dtype or not side.is_contiguous():
        raise InputError(
            f"{name} is {side.dtype} {tuple(side.shape)} with strides {side.stride()}; "
            f"it must be contiguous {dtype} {want}"
        )


@dataclass(frozen=True)
class PageTable:
    """Pages of ``B`` requests: int32 ``indptr [B + 1]``, ``indices``, ``last_page_len [B]``."""

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
    """``[S, Hkv, X]`` rows of ``side [P, page_size, Hkv, X]``."""
    page_size = side.shape[1]
    return side[slots // page_size, slots % page_size]


def check_int8_cache(k: Tensor, v: Tensor, k_scales: Tensor, v_scales: Tensor) -> None:
    """Codes int8 and their fp16 scales ``[P, page_size, Hkv, Gr]``."""
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
