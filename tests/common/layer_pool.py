"""What engines of the tests have in common: one layer's pool in plain tensors, and attention in float64."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerPool:
    """`witcert_core.cache.protocols.Pool` of a single layer: keys k [SLOTS, HKV, D] and values v, written in place."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.k[:, None], self.v[:, None]

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.k[slots], self.v[slots]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.k[slots], self.v[slots] = k, v

    def restore(self, layer: int, slots: Tensor, head: int, k: Tensor, v: Tensor) -> None:
        self.k[slots, head], self.v[slots, head] = k, v


def attention(q: Tensor, k: Tensor, v: Tensor, *, cap: float = 0.0) -> tuple[Tensor, Tensor]:
    """Output [HQ, D] and weights [HQ, S] of one query [HQ, D] over k, v [S, HKV, D], in float64; cap 0 for none."""
    k, v = (x.double().repeat_interleave(len(q) // k.shape[1], 1) for x in (k, v))
    logits = torch.einsum("hd,shd->hs", q.double(), k) * q.shape[-1] ** -0.5
    weights = (cap * (logits / cap).tanh() if cap else logits).softmax(-1)
    return torch.einsum("hs,shd->hd", weights, v), weights
