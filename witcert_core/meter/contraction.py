"""Sums over bands of what a query and what a token have there, by KV head and rounded up."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from witcert_core.errors import InputError

SUM_UP = 1.0 + 2.0**-40
"""Covers the float64 rounding of sums over up to 2^11 channels."""


def contract_up(per_query: Tensor, per_token: Tensor, sm_scale: float) -> Tensor:
    """``|sm_scale| * sum_b x[h, b] y[s, h // G, b]``, ``[H, S]`` of ``x [H, B]`` and ``y [S, Hkv, B]``, float64.

    Rounded up; infinite if a term is not finite.
    """
    grouped = by_kv_head(per_query, per_token.shape[1], sm_scale)
    total = torch.einsum("kgb,skb->kgs", grouped, per_token).mul_(abs(sm_scale) * SUM_UP)
    # All terms are non-negative, so their sum is finite only if each is.
    if not bool(total.isfinite().all()):
        unknown = ~per_token.sum(dim=-1).isfinite().T[:, None, :] | ~grouped.sum(dim=-1).isfinite()[:, :, None]
        total = torch.where(unknown, float("inf"), total)
    return total.reshape(per_query.shape[0], -1)


def by_kv_head(per_query: Tensor, kv_heads: int, sm_scale: float) -> Tensor:
    """``[H, X]`` by KV head, ``[Hkv, G, X]``."""
    heads = per_query.shape[0]
    if heads % kv_heads:
        raise InputError(f"{heads} query heads cannot share {kv_heads} KV heads; the first must be a multiple")
    if not math.isfinite(sm_scale):
        raise InputError(f"sm_scale is {sm_scale}; it must be finite")
    return per_query.reshape(kv_heads, heads // kv_heads, -1)
