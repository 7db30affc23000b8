"""Prompts that were computed once: a pass that reads exact keys is the same whatever becomes of them afterwards.

Shapes: N tokens of the prompt, Hkv KV heads, D head_dim, Dv v_head_dim, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from witcert_core.meter.attention import AttentionSpec

MOST_BYTES = 2 * 2**30


@dataclass(frozen=True)
class StoredLayer:
    """What a layer writes of a prompt: exact keys k [N, Hkv, D] and values v [N, Hkv, Dv], and how it attends."""

    layer: int
    k: Tensor
    v: Tensor
    spec: AttentionSpec


@dataclass(frozen=True)
class PromptPass:
    """All layers in the order in which they attended, and the logits [1, V] after the last token."""

    layers: Sequence[StoredLayer]
    logits: Tensor

    @property
    def nbytes(self) -> int:
        return self.logits.nbytes + sum(layer.k.nbytes + layer.v.nbytes for layer in self.layers)


class PromptPasses:
    """Passes of one model by their tokens, up to `most_bytes` in all; of more, those unused longest are dropped."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[int, ...], PromptPass] = OrderedDict()
        self._nbytes = 0

    def get(self, ids: Sequence[int]) -> PromptPass | None:
        found = self._kept.get(tuple(ids))
        if found is not None:
            self._kept.move_to_end(tuple(ids))
        return found

    def put(self, ids: Sequence[int], made: PromptPass) -> None:
        """Keep a pass that is not kept yet; one larger than everything may be is not."""
        if made.nbytes > self._most_bytes:
            return
        self._kept[tuple(ids)] = made
        self._nbytes += made.nbytes
        while self._nbytes > self._most_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._nbytes -= dropped.nbytes
