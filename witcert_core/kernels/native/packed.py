"""The packed cache and its pages as ``packed.h`` and ``attention.h`` are given them."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_uint64, c_void_p

import torch

from witcert_core.kernels.host.arguments import DitherOf, PackedCache
from witcert_core.kernels.host.checks import seed_of
from witcert_core.kernels.host.pages import PageTable
from witcert_core.kernels.native.build import DTYPES, pointers

_POINTERS = ("k", "v", "k_scales", "v_scales", "witness", "pass_ids", "head_ids", "keep", "channels", "bypass")
_SIZES = (
    *("k_page", "k_token", "k_head", "v_page", "v_token", "v_head"),
    *("kv_heads", "head_dim", "v_dim", "page_size", "bypassed", "layer", "dtype"),
)


class Cache(ctypes.Structure):
    """``Cache`` of ``packed.h``, field for field."""

    _fields_ = [*((n, c_void_p) for n in _POINTERS), *((n, c_int64) for n in _SIZES), ("seed", c_uint64)]

    @classmethod
    def of(cls, cache: PackedCache, dither: DitherOf, dtype: torch.dtype) -> Cache:
        """For keys or queries of ``dtype``; made once."""
        found = cache.laid_out.get((dither, dtype))
        if found is None:
            found = cache.laid_out[dither, dtype] = cls._of(cache, dither, dtype)
        return found

    @classmethod
    def _of(cls, cache: PackedCache, dither: DitherOf, dtype: torch.dtype) -> Cache:
        k, v, bypass = cache.k, cache.v, cache.bypass
        tensors = {"k": k, "v": v, "k_scales": cache.k_scales, "v_scales": cache.v_scales, "witness": cache.witness}
        tensors |= {"pass_ids": cache.pass_ids, "head_ids": cache.head_ids}
        if bypass is not None:
            tensors |= {"keep": bypass.keep, "channels": bypass.channels, "bypass": bypass.k}
        sizes = (*k.stride()[:3], *v.stride()[:3], k.shape[2], k.shape[3], v.shape[3], k.shape[1])
        counts = (*sizes, cache.bypassed, dither.layer, DTYPES[dtype])
        return cls(
            **pointers(tensors), **dict(zip(_SIZES, counts, strict=True)), seed=seed_of(dither.key) & (2**64 - 1)
        )


class Pages(ctypes.Structure):
    """``Pages`` of ``attention.h``."""

    _fields_ = [(name, c_void_p) for name in ("indptr", "indices", "last_page_len")]

    @classmethod
    def of(cls, table: PageTable) -> Pages:
        return cls(table.indptr.data_ptr(), table.indices.data_ptr(), table.last_page_len.data_ptr())
