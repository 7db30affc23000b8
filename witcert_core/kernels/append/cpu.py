"""The INT8 writer of ``cpu.cpp``: arguments laid out for it, and the call."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from witcert_core.kernels.host.arguments import DitherOf, PackedCache
from witcert_core.kernels.native.build import check_channels, compiled, pointers
from witcert_core.kernels.native.packed import Cache

_POINTERS = ("key", "value", "slots")
_SIZES = ("key_token", "key_head", "value_token", "value_head", "tokens", "threads")


class Arguments(ctypes.Structure):
    """``Arguments`` of ``cpu.cpp``, field for field."""

    _fields_ = [
        ("cache", Cache),
        *((name, c_void_p) for name in _POINTERS),
        *((name, c_int64) for name in _SIZES),
    ]


def append_cpu(key: Tensor, value: Tensor, cache: PackedCache, slots: Tensor, dither: DitherOf) -> None:
    """Write ``key [T, Hkv, D]`` and ``value [T, Hkv, Dv]``; arguments as `append_int8` has checked them."""
    check_channels(*(x.shape[3] for x in (cache.k, cache.v)))
    sizes = (*key.stride()[:2], *value.stride()[:2], key.shape[0], torch.get_num_threads())
    arguments = Arguments(
        cache=Cache.of(cache, dither, key.dtype),
        **pointers({"key": key, "value": value, "slots": slots}),
        **dict(zip(_SIZES, sizes, strict=True)),
    )
    compiled("append")(ctypes.byref(arguments))
