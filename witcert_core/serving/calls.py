"""One attention call of an engine, as the caches take it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from witcert_core.quantizers.base import Encoded


@dataclass(frozen=True)
class AttentionCall:
    """N new tokens of one layer.

    q [N, H, D] as attention uses it; exact_k [N, Hkv, D] and exact_v [N, Hkv, Dv] in the pool's dtype; slots [N]
    int64, where they go; positions [N]. sinks [H] or None; window_left negative for no window.
    run(k, v): the engine's own attention with these in place of the new tokens' keys and values, which it writes into
    its pool; run(None, None) with what the model handed over. Its result is the layer's output, whatever its shape.
    reads_stored: whether the new tokens read their quantized selves (decode, and chunks under
    `prefill_reads: stored`).
    """

    layer: int
    q: Tensor
    exact_k: Tensor
    exact_v: Tensor
    slots: Tensor
    positions: Tensor
    sm_scale: float
    run: Callable[[Tensor | None, Tensor | None], Tensor]
    reads_stored: bool
    logits_soft_cap: float = 0.0
    window_left: int = -1
    sinks: Tensor | None = None


@dataclass(frozen=True)
class Coded:
    """What a quantizer made of a tensor: values [N, Hkv, D] float32 the cache gives back and, dithered, codes."""

    values: Tensor
    codes: Encoded | None
