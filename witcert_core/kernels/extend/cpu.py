"""The INT8 extend kernel of ``cpu.cpp``: arguments laid out for it, and the call."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p

import torch
from torch import Tensor

from witcert_core.kernels.extend.launch import Chunk
from witcert_core.kernels.host.arguments import DitherOf, PackedCache
from witcert_core.kernels.native.build import check_channels, compiled, pointers
from witcert_core.kernels.native.packed import Cache, Pages
from witcert_core.meter.attention import AttentionSpec

_POINTERS = ("q", "k_new", "v_new", "qo_indptr", "meter_rows", "delta_loc", "sinks", "out", "lse", "acc")
_SIZES = (
    *("q_row", "q_head", "k_row", "k_head", "v_row", "v_head"),
    *("batch", "heads", "metered", "window_left", "threads"),
)


class Arguments(ctypes.Structure):
    """``Arguments`` of ``cpu.cpp``, field for field."""

    _fields_ = [
        ("cache", Cache),
        ("pages", Pages),
        *((name, c_void_p) for name in _POINTERS),
        *((name, c_int64) for name in _SIZES),
        *((name, c_double) for name in ("sm_scale", "soft_cap")),
    ]


def extend_cpu(
    chunk: Chunk,
    cache: PackedCache,
    dither: DitherOf,
    spec: AttentionSpec,
    meter_rows: Tensor,
    delta_loc: Tensor | None,
    out: Tensor,
    lse: Tensor,
    acc: Tensor,
) -> int:
    """Fill ``out [T, Hq, Dv]``, ``lse [T, Hq]`` and ``acc [R, Hq, 16]``, all contiguous.

    Returns:
        the number of cells measured. Arguments as in :func:`witcert_core.kernels.extend.extend_int8`, checked there.
    """
    check_channels(*(x.shape[3] for x in (cache.k, cache.v)))
    q, k, v = chunk.q, chunk.k, chunk.v
    tensors: dict[str, Tensor | None] = {
        "q": q,
        "k_new": k,
        "v_new": v,
        "qo_indptr": chunk.qo_indptr,
        "meter_rows": meter_rows,
    }
    tensors |= {
        "meter_rows": meter_rows,
        "delta_loc": delta_loc,
        "sinks": spec.sinks,
        "out": out,
        "lse": lse,
        "acc": acc,
    }
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    sizes = (chunk.table.batch_size, q.shape[1], meter_rows.numel(), spec.window_left, torch.get_num_threads())
    arguments = Arguments(
        cache=Cache.of(cache, dither, q.dtype),
        pages=Pages.of(chunk.table),
        **pointers(tensors),
        **dict(zip(_SIZES, (*strides, *sizes), strict=True)),
        sm_scale=spec.sm_scale,
        soft_cap=spec.logits_soft_cap,
    )
    return int(compiled("extend")(ctypes.byref(arguments)))
