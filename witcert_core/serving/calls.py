"""One attention call of an engine, as the caches take it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from witcert_core.meter.attention import AttentionSpec
from witcert_core.quantizers.base import Encoded


@dataclass(frozen=True)
class AttentionCall:
    """N new tokens of one layer.

    q [N, H, D] as attention uses it; exact_k [N, Hkv, D] and exact_v [N, Hkv, Dv] in the pool's dtype; slots [N]
    int64, where they go; positions [N]. spec: how the layer attends.
    run(k, v): the engine's own attention with these in place of the new tokens' keys and values, which it writes into
    its pool; run(None, None) with what the model handed over. Its result is the layer's output, whatever its shape.
    attends_quantized: whether the new tokens read their quantized selves (decode, and chunks under
    `prefill_reads: stored`): one answer for all, or [N] bool where decode rows and chunks share a pass.
    """

    layer: int
    q: Tensor
    exact_k: Tensor
    exact_v: Tensor
    slots: Tensor
    positions: Tensor
    spec: AttentionSpec
    run: Callable[[Tensor | None, Tensor | None], Tensor]
    attends_quantized: bool | Tensor

    @property
    def early(self) -> Tensor:
        """[N] bool: tokens whose quantized selves are read in this pass already."""
        if isinstance(self.attends_quantized, Tensor):
            return self.attends_quantized
        return torch.full((self.slots.numel(),), self.attends_quantized, device=self.slots.device)

    @property
    def alike(self) -> bool | None:
        """What `early` says where it says the same of all tokens, else None."""
        if not isinstance(self.attends_quantized, Tensor):
            return self.attends_quantized
        first = bool(self.attends_quantized[0])
        return first if bool((self.attends_quantized == first).all()) else None

    @property
    def read_exactly(self) -> AttentionCall | None:
        """The tokens whose exact selves are read in this pass; None if there are none."""
        late = ~self.early
        return self.part(late) if bool(late.any()) else None

    def part(self, chosen: Tensor) -> AttentionCall:
        """The call of the `chosen` [N] bool tokens alone, for writing and accounting; it must not be run."""
        if bool(chosen.all()):
            return self
        rows = {name: getattr(self, name)[chosen] for name in ("q", "exact_k", "exact_v", "slots", "positions")}
        return replace(self, **rows)


@dataclass(frozen=True)
class Quantized:
    """What a quantizer made of a tensor: values [N, Hkv, D] float32 the cache gives back and, dithered, codes."""

    values: Tensor
    codes: Encoded | None

    def part(self, chosen: Tensor) -> Quantized:
        """That of the `chosen` [N] bool tokens."""
        if bool(chosen.all()):
            return self
        codes = self.codes
        if codes is not None:
            codes = Encoded(codes.codes[chosen], codes.scales[chosen], codes.values[chosen])
        return Quantized(self.values[chosen], codes)
