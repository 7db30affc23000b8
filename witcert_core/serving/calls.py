"""One attention call of an engine, as the caches take it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from witcert_core.meter.attention import AttentionSpec
from witcert_core.quantizers.base import Encoded
from witcert_core.quantizers.dither import GROUP, num_groups


@dataclass(frozen=True)
class AttentionCall:
    """N new tokens of one layer.

    q [N, H, D] as attention uses it, or of the first tokens only, where no other row is metered; exact_k [N, Hkv, D],
    exact_v [N, Hkv, Dv] in the pool's dtype; slots [N] int64, where they go; positions [N]. spec: how the layer
    attends.
    run(k, v): the engine's own attention with these in place of the new tokens' keys and values, which it writes into
    its pool; run(None, None) with what the model handed over. Its result is the layer's output, whatever its shape.
    """

    layer: int
    q: Tensor
    exact_k: Tensor
    exact_v: Tensor
    slots: Tensor
    positions: Tensor
    spec: AttentionSpec
    run: Callable[[Tensor | None, Tensor | None], Tensor]

    def part(self, places: Tensor) -> AttentionCall:
        """The call of the tokens at `places` int64 [M] alone, for writing and accounting; it must not be run."""
        rows = {name: getattr(self, name)[places] for name in ("exact_k", "exact_v", "slots", "positions")}
        return replace(self, **rows)


@dataclass(frozen=True)
class Quantized:
    """What a quantizer made of a tensor: values [N, Hkv, D] float32 the cache gives back and, dithered, codes."""

    values: Tensor
    codes: Encoded | None

    def part(self, places: Tensor) -> Quantized:
        """That of the tokens at `places` int64 [M]."""
        codes = self.codes
        if codes is not None:
            codes = Encoded(codes.codes[places], codes.scales[places], codes.values[places])
        return Quantized(self.values[places], codes)

    def leading(self, channels: int) -> Quantized:
        """Its first `channels` channels; of dithered codes whole groups."""
        codes = self.codes
        if codes is not None:
            groups = num_groups(channels, GROUP)
            codes = Encoded(codes.codes[..., :channels], codes.scales[..., :groups], codes.values[..., :channels])
        return Quantized(self.values[..., :channels], codes)


T = TypeVar("T", AttentionCall, Quantized)


class AttendsQuantized:
    """Which of the N new tokens of a pass attend their quantized selves in it, the others their exact ones.

    Decode rows do, and chunks under `prefill_reads: stored`: one answer for all tokens of a request, known on the host
    when the pass begins. What layers index with is copied to the device once.
    """

    def __init__(self, of_requests: Sequence[bool], new_tokens: Sequence[int], device: torch.device) -> None:
        self.of_requests = list(of_requests)
        of_tokens = [reads for reads, count in zip(of_requests, new_tokens, strict=True) for _ in range(count)]
        self.any, self.all = any(of_tokens), all(of_tokens)
        self.mask = torch.tensor(of_tokens, dtype=torch.bool).to(device)
        """Bool [N]."""
        self._places = [
            torch.tensor([i for i, reads in enumerate(of_tokens) if reads is wanted], dtype=torch.int64).to(device)
            for wanted in (True, False)
        ]

    def split(self, whole: T) -> tuple[T | None, T | None]:
        """The part of the tokens that attend their quantized selves and of the others, None where there are none."""
        if self.all:
            return whole, None
        if not self.any:
            return None, whole
        quantized, exact = self._places
        return whole.part(quantized), whole.part(exact)
