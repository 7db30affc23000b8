"""The truth a bound is compared with: exact attention weights and their total variation, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_logits(q: Tensor, k: Tensor, sm_scale: float, logits_soft_cap: float = 0.0) -> Tensor:
    """Logits ``[H, S]`` of ``q [H, D]`` against ``k [S, Hkv, D]`` in the dtype of the arguments.

    Query head ``h`` reads KV head ``h // (H / Hkv)``. A positive soft cap gives ``cap * tanh(z / cap)``.
    """
    heads, kv_heads = q.shape[0], k.shape[1]
    grouped = q.reshape(kv_heads, heads // kv_heads, q.shape[-1])
    z = torch.einsum("kgd,skd->kgs", grouped, k).reshape(heads, -1) * sm_scale
    return logits_soft_cap * torch.tanh(z / logits_soft_cap) if logits_soft_cap > 0.0 else z


def softmax_with_sink(logits: Tensor, sink_logits: Tensor | None = None) -> Tensor:
    """Weights ``[H, S]``, or ``[H, S + 1]`` with the sink's weight last, in the dtype of the logits."""
    if sink_logits is not None:
        logits = torch.cat((logits, sink_logits.to(logits.dtype)[:, None]), dim=-1)
    return torch.softmax(logits, dim=-1)


def total_variation(p: Tensor, p_tilde: Tensor) -> Tensor:
    """``sum |p - p~| / 2`` over the last axis, float64 ``[...]``."""
    return 0.5 * (p.to(torch.float64) - p_tilde.to(torch.float64)).abs().sum(dim=-1)
