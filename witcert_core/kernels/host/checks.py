"""Checks of arguments that operations share, and their small conversions."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.kernels.host import slack
from witcert_core.quantizers.dither import DitherKey


def seed_of(key: DitherKey) -> int:
    """The Philox key as one signed 64-bit integer, first word low."""
    low, high = key.words()
    value = high << 32 | low
    return value - 2**64 if value >= 2**63 else value


def pass_bits(pass_ids: Tensor, num_slots: int) -> Tensor:
    """``[SLOTS]`` pass ids as int32 bits (uint32 is taken as it is; id 0 means never written)."""
    if pass_ids.dtype not in (torch.int32, torch.uint32) or pass_ids.dim() != 1 or not pass_ids.is_contiguous():
        raise InputError(
            f"pass_ids is {pass_ids.dtype} {tuple(pass_ids.shape)}; it must be contiguous uint32 or int32, 1-D"
        )
    if pass_ids.numel() < num_slots:
        raise InputError(f"pass_ids has {pass_ids.numel()} entries for {num_slots} slots; one per slot is needed")
    return pass_ids.view(torch.int32)


def splits_for(max_kv_len: int) -> int:
    """Splits of the longest request."""
    if not 0 <= max_kv_len <= slack.MAX_KV_LEN:
        raise InputError(
            f"max_kv_len is {max_kv_len}; allowed are 0..{slack.MAX_KV_LEN}, beyond which the fp32 sums "
            "of the meter would need a wider margin"
        )
    return max(1, -(-max_kv_len // slack.SPLIT_TOKENS))


def softmax_scale(sm_scale: float | None, head_dim: int) -> float:
    """``sm_scale``, or ``1 / sqrt(D)``; it must be finite."""
    value = 1.0 / math.sqrt(head_dim) if sm_scale is None else sm_scale
    if not math.isfinite(value):
        raise InputError(f"sm_scale is {sm_scale}; it must be finite")
    return value


def check_queries(q: Tensor, head_dim: int, kv_heads: int, rows: int | None) -> None:
    """``q [R, Hq, D]`` with adjacent channels, ``Hq`` a multiple of ``Hkv``."""
    if q.dim() != 3 or q.shape[2] != head_dim or q.stride(2) != 1 or q.shape[1] % kv_heads:
        raise InputError(
            f"q is {tuple(q.shape)} with strides {q.stride()}; it must be [R, Hq, {head_dim}] with adjacent "
            f"channels and Hq a multiple of {kv_heads}"
        )
    if rows is not None and q.shape[0] != rows:
        raise InputError(f"q has {q.shape[0]} rows; the page table and q_len make {rows}")


def check_vector(name: str, tensor: Tensor | None, length: int, dtype: torch.dtype | None = None) -> None:
    """Contiguous ``[LENGTH]`` (and of ``dtype``), or absent."""
    if tensor is None:
        return
    wrong = tuple(tensor.shape) != (length,) or not tensor.is_contiguous()
    if wrong or (dtype is not None and tensor.dtype != dtype):
        raise InputError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be contiguous [{length}]"
            + (f" of {dtype}" if dtype is not None else "")
        )


def kernel_float(tensor: Tensor | None, name: str, length: int) -> Tensor | None:
    """Numbers per head ``[LENGTH]``, checked, in fp32."""
    check_vector(name, tensor, length)
    return None if tensor is None else tensor.to(torch.float32)


@functools.lru_cache(maxsize=32)
def band_on(channel_band: Tensor, device: torch.device) -> Tensor:
    """int32 copy of a band map ``[D]`` on ``device``, made once: a copy from the host cannot be captured in a
    graph."""
    return channel_band.to(device=device, dtype=torch.int32)
