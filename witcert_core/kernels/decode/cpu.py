"""The INT8 decode kernel of ``cpu.cpp``: arguments laid out for it, and the call."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p

import torch
from torch import Tensor

from witcert_core.kernels.host.arguments import DitherOf, PackedCache
from witcert_core.kernels.host.pages import PageTable
from witcert_core.kernels.native.build import check_channels, compiled, pointers
from witcert_core.kernels.native.packed import Cache, Pages
from witcert_core.meter.attention import AttentionSpec

_POINTERS = ("q", "delta_loc", "sinks", "out", "lse", "acc")
_SIZES = ("q_row", "q_head", "batch", "q_len", "heads", "window_left", "meter", "threads")


class Arguments(ctypes.Structure):
    """``Arguments`` of ``cpu.cpp``, field for field."""

    _fields_ = [
        ("cache", Cache),
        ("pages", Pages),
        *((name, c_void_p) for name in _POINTERS),
        *((name, c_int64) for name in _SIZES),
        *((name, c_double) for name in ("sm_scale", "soft_cap")),
    ]


def decode_cpu(
    q: Tensor,
    cache: PackedCache,
    table: PageTable,
    dither: DitherOf,
    spec: AttentionSpec,
    delta_loc: Tensor | None,
    out: Tensor,
    lse: Tensor,
    acc: Tensor | None,
    *,
    q_len: int,
) -> int:
    """Fill ``out [R, Hq, Dv]``, ``lse [R, Hq]`` and, if it is there, ``acc [R, Hq, 16]``, all contiguous.

    Returns:
        the number of cells measured. Arguments as in :func:`witcert_core.kernels.decode.decode_int8`, checked there.
    """
    check_channels(*(x.shape[3] for x in (cache.k, cache.v)))
    tensors = {"q": q, "delta_loc": delta_loc, "sinks": spec.sinks, "out": out, "lse": lse, "acc": acc}
    sizes = (*q.stride()[:2], table.batch_size, q_len, q.shape[1], spec.window_left, acc is not None)
    arguments = Arguments(
        cache=Cache.of(cache, dither, q.dtype),
        pages=Pages.of(table),
        **pointers(tensors),
        **dict(zip(_SIZES, (*sizes, torch.get_num_threads()), strict=True)),
        sm_scale=spec.sm_scale,
        soft_cap=spec.logits_soft_cap,
    )
    return int(compiled("decode")(ctypes.byref(arguments)))
