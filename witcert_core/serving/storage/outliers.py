"""Which outlier channels of K stay in 16 bit, decided on enough keys (`witcert_core/cache/outliers.py`).

The first keys an engine computes are often nobody's: a warm-up prompt of a few words, a health check of one token.
Channels chosen from those serve at once, but their tokens are kept exactly, and a first longer pass chooses again from
all of them: then they are written once more, under the dither of that pass. Some of them were sampled over keys
with the old row, which the scales chosen now must not depend on. After that the choice is final.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from witcert_core.cache.packed import PackedKV
from witcert_core.serving.calls import AttentionCall

ENOUGH = 64
"""New tokens of a pass from which a choice is final."""
MOST = 256
"""Tokens of a layer that are kept for a second choice; with more the choice is made from them."""


class OutlierChoice:
    """The choices of one process, a layer each; layers without outliers in 16 bit have none to make."""

    def __init__(self, cache: PackedKV) -> None:
        self.cache = cache
        self._kept: dict[int, list[AttentionCall]] = {
            number: [] for number, layer in cache.layers.items() if layer.k_bypass is not None
        }

    def settle(self) -> None:
        """Every choice is final: from now on tokens are written that cannot be kept. Layers must have chosen."""
        self._kept.clear()

    def before(self, call: AttentionCall) -> list[AttentionCall] | None:
        """Decide before `call` is written. None if its layer's choice is not made now, else the calls that must be
        written again, in that order (none of them when nothing was written before); their slots have this pass's row,
        in all layers, each of which decides in the same pass."""
        kept = self._kept.get(call.layer)
        if kept is None:
            return None
        before = self.cache[call.layer].channels
        tokens = call.slots.numel() + sum(other.slots.numel() for other in kept)
        final = call.slots.numel() >= ENOUGH or tokens > MOST
        if not final and before is not None:
            kept.append(_copied(call))
            return None
        self.cache.choose(call.layer, torch.cat([*(other.exact_k for other in kept), call.exact_k]))
        if final:
            del self._kept[call.layer]
            for other in kept:
                self.cache.pass_ids[other.slots] = self.cache.pass_ids[call.slots[:1]]
            return kept
        kept.append(_copied(call))
        return []


def _copied(call: AttentionCall) -> AttentionCall:
    """What writing the call again takes, in memory of its own: engines reuse the tensors of a pass."""
    k, v = call.exact_k.clone(), call.exact_v.clone()
    return replace(
        call, q=k, exact_k=k, exact_v=v, slots=call.slots.clone(), positions=call.positions.clone(), run=_ran
    )


def _ran(_k: Tensor | None, _v: Tensor | None) -> Tensor:
    raise RuntimeError("a pass that is over does not attend again")
