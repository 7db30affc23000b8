"""The meter of ``cpu.cpp`` over any pool: arguments laid out for it, and the call."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_double, c_int64, c_void_p

import torch
from torch import Tensor

from witcert_core.cache.norm_codes import decode_norm
from witcert_core.kernels.host.pages import PageTable
from witcert_core.kernels.native.build import DTYPES, check_channels, compiled, pointers
from witcert_core.kernels.native.packed import Pages
from witcert_core.meter.attention import AttentionSpec

_POINTERS = (
    *("q", "k", "v", "witness", "value_witness", "steps", "band", "levels", "delta_loc", "row_request", "row_position"),
    *("sinks", "acc", "omega", "lse"),
)
_SIZES = (
    *("q_row", "q_head", "k_page", "k_token", "k_head", "v_page", "v_token", "v_head"),
    *("rows", "heads", "kv_heads", "head_dim", "v_dim", "page_size", "bands", "q_dtype", "dtype", "window_left"),
    "threads",
)


@functools.cache
def _levels() -> Tensor:
    """What each code of a witness stands for, ``[256]``."""
    return decode_norm(torch.arange(256, dtype=torch.uint8)).to(torch.float32)


class Arguments(ctypes.Structure):
    """``Arguments`` of ``cpu.cpp``, field for field."""

    _fields_ = [
        ("pages", Pages),
        *((name, c_void_p) for name in _POINTERS),
        *((name, c_int64) for name in _SIZES),
        *((name, c_double) for name in ("sm_scale", "soft_cap", "engine_constant")),
    ]


def certify_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    witness: Tensor,
    value_witness: Tensor | None,
    channel_band: Tensor,
    num_bands: int,
    steps: Tensor | None,
    delta_loc: Tensor | None,
    table: PageTable,
    row_request: Tensor,
    row_position: Tensor,
    spec: AttentionSpec,
    engine_constant: float,
    acc: Tensor,
    omega: Tensor,
    lse: Tensor,
) -> int:
    """Fill ``acc [R, Hq, 16]``, ``omega [R, Hq]`` and base-2 ``lse [R, Hq]``, fp32 and contiguous.

    Returns:
        the number of cells measured. Arguments as in :func:`witcert_core.kernels.certify.certify`, checked there;
        ``channel_band`` int32 ``[D]``, V is not read without ``value_witness``.
    """
    check_channels(k.shape[3], v.shape[3])
    tensors = {"q": q, "k": k, "v": None if value_witness is None else v, "witness": witness}
    tensors |= {"value_witness": value_witness, "steps": steps, "band": channel_band, "levels": _levels()}
    tensors |= {"delta_loc": delta_loc, "row_request": row_request, "row_position": row_position}
    tensors |= {"sinks": spec.sinks, "acc": acc, "omega": omega, "lse": lse}
    sizes = (
        *(*q.stride()[:2], *k.stride()[:3], *v.stride()[:3]),
        *(*q.shape[:2], k.shape[2], k.shape[3], v.shape[3], k.shape[1], num_bands),
        *(DTYPES[q.dtype], DTYPES[k.dtype], spec.window_left, torch.get_num_threads()),
    )
    arguments = Arguments(
        pages=Pages.of(table),
        **pointers(tensors),
        **dict(zip(_SIZES, sizes, strict=True)),
        sm_scale=spec.sm_scale,
        soft_cap=spec.logits_soft_cap,
        engine_constant=engine_constant,
    )
    return int(compiled("certify")(ctypes.byref(arguments)))
