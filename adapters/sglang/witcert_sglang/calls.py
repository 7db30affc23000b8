"""One attention call of the engine, as the caches of this adapter take it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from witcert_core.quantizers.base import Encoded


@dataclass(frozen=True)
class AttentionCall:
    """q, k, v as the model handed them over; exact_k [N, Hkv, D] and exact_v [N, Hkv, Dv] in the cache's dtype.

    attention: the engine's own implementation. reads_stored: whether the new tokens read their quantized selves
    (decode, and chunks under `prefill_reads: stored`).
    """

    attention: Callable[..., Tensor]
    q: Tensor
    k: Tensor
    v: Tensor
    exact_k: Tensor
    exact_v: Tensor
    layer: Any
    forward_batch: Any
    reads_stored: bool
    kwargs: dict[str, Any]

    @property
    def slots(self) -> Tensor:
        """Where the N new tokens go."""
        slots: Tensor = self.forward_batch.out_cache_loc
        return slots

    def run(self, k: Tensor, v: Tensor) -> Tensor:
        """The engine's attention with k and v in place of the new tokens' own; it writes them into its pool."""
        return self.attention(self.q, k, v, self.layer, self.forward_batch, save_kv_cache=True, **self.kwargs)


@dataclass(frozen=True)
class Coded:
    """What a quantizer made of a tensor: values [N, Hkv, D] float32 the cache gives back and, dithered, codes."""

    values: Tensor
    codes: Encoded | None
