"""The witness writer of ``cpu.cpp``: arguments laid out for it, and the call."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from witcert_core.cache.norm_codes import decode_norm
from witcert_core.kernels.native.build import DTYPES, check_channels, compiled, pointers

_POINTERS = (*("exact_k", "exact_v", "stored_k", "stored_v", "witness", "value_witness", "slots", "band", "levels"),)
_SIZES = (
    *("tokens", "heads", "head_dim", "v_dim", "bands", "k_dtype", "v_dtype", "stored_k_dtype", "stored_v_dtype"),
    "threads",
)


@functools.cache
def _levels() -> Tensor:
    """What each code of a witness stands for, ``[256]``."""
    return decode_norm(torch.arange(256, dtype=torch.uint8))


class Arguments(ctypes.Structure):
    """``Arguments`` of ``cpu.cpp``, field for field."""

    _fields_ = [*((name, c_void_p) for name in _POINTERS), *((name, c_int64) for name in _SIZES)]


def record_cpu(
    exact_k: Tensor,
    exact_v: Tensor,
    stored_k: Tensor,
    stored_v: Tensor,
    witness: Tensor,
    value_witness: Tensor,
    slots: Tensor,
    channel_band: Tensor,
    num_bands: int,
) -> None:
    """Write ``witness [SLOTS, Hkv, B]`` and ``value_witness [SLOTS, Hkv]`` of ``T`` tokens ``[T, Hkv, D]``, contiguous.

    Arguments as in :func:`witcert_core.kernels.witness.record_witness`, checked there.
    """
    check_channels(exact_k.shape[2], exact_v.shape[2])
    given = {"exact_k": exact_k, "exact_v": exact_v, "stored_k": stored_k, "stored_v": stored_v}
    given |= {
        "witness": witness,
        "value_witness": value_witness,
        "slots": slots,
        "band": channel_band,
        "levels": _levels(),
    }
    dtypes = (DTYPES[x.dtype] for x in (exact_k, exact_v, stored_k, stored_v))
    sizes = (*exact_k.shape, exact_v.shape[2], num_bands, *dtypes, torch.get_num_threads())
    arguments = Arguments(**pointers(given), **dict(zip(_SIZES, sizes, strict=True)))
    compiled("witness")(ctypes.byref(arguments))
