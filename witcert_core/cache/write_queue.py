"""Writes that wait to be accounted for, so that the tokens of several decode passes are bounded in one go.

What a token's side tensors say follows from the tensors of its write alone, and nobody asks before a row that reads the
token is metered. A pass of a few tokens costs as much as one of a few hundred: nearly all of it is the number of tensor
operations. So small writes are kept, as copies, until something asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from witcert_core.quantizers.base import Encoded

MAX_WAITING = 128
"""Tokens of a layer that may wait; as many more tensors of K and V, exact and stored, lie in memory."""
SMALL = 32
"""Writes of more tokens than this do not wait."""
PIECE = 2**16
"""Elements of K that are accounted for at a time: half a megabyte in float64."""


@dataclass(frozen=True)
class Write:
    """N tokens written into `slots` [N], as `WitnessStore.write` takes them."""

    slots: Tensor
    exact_k: Tensor
    exact_v: Tensor
    stored_k: Tensor
    stored_v: Tensor
    encoded_k: Encoded | None
    encoded_v: Encoded | None

    def copied(self) -> Write:
        """The same with memory of its own: engines reuse the tensors of a pass; what is stored is a copy already."""
        return replace(self, slots=self.slots.clone(), exact_k=self.exact_k.clone(), exact_v=self.exact_v.clone())

    def split(self) -> list[Write]:
        """The same in pieces whose float64 copies stay in a core's cache."""
        tokens = self.slots.numel()
        size = max(SMALL, PIECE // self.exact_k[0].numel()) if tokens else 1
        if tokens <= size:
            return [self]

        def piece(first: int) -> Write:
            return _mapped([self], lambda parts: parts[0][first : first + size])

        return [piece(first) for first in range(0, tokens, size)]

    @property
    def kind(self) -> list[torch.dtype]:
        """Writes of one kind can be joined: a layer's tokens have one shape."""
        parts = [self.exact_k, self.exact_v, self.stored_k, self.stored_v]
        for codes in (self.encoded_k, self.encoded_v):
            parts += [] if codes is None else [codes.codes, codes.scales, codes.values]
        return [part.dtype for part in parts]


class WriteQueue:
    """The writes into one layer that wait, in their order."""

    def __init__(self) -> None:
        self._writes: list[Write] = []
        self._tokens = 0

    def add(self, write: Write) -> bool:
        """Let a small write wait; false if it, or the writes before it, must be accounted for now."""
        tokens = write.slots.numel()
        if tokens > SMALL or self._tokens + tokens > MAX_WAITING:
            return False
        self._writes.append(write.copied())
        self._tokens += tokens
        return True

    def take(self) -> list[Write]:
        """What waited; nothing waits afterwards."""
        writes, self._writes, self._tokens = self._writes, [], 0
        return writes


def joined(writes: list[Write]) -> list[Write]:
    """The same in as few writes as leave the last one into a slot the last."""
    if len(writes) < 2 or writes[0].slots.device.type != "cpu":  # whether slots repeat, a device would be asked
        return writes
    slots = torch.cat([write.slots for write in writes])
    kind = writes[0].kind
    if any(write.kind != kind for write in writes) or torch.unique(slots).numel() < slots.numel():
        return writes
    return [_mapped(writes, torch.cat)]


def _mapped(writes: list[Write], of: Callable[[list[Tensor]], Tensor]) -> Write:
    """One write whose tensors are `of` those of `writes`, which are of one kind."""

    def codes(parts: list[Encoded | None]) -> Encoded | None:
        known = [part for part in parts if part is not None]
        if not known:
            return None
        return Encoded(of([c.codes for c in known]), of([c.scales for c in known]), of([c.values for c in known]))

    return Write(
        slots=of([w.slots for w in writes]),
        exact_k=of([w.exact_k for w in writes]),
        exact_v=of([w.exact_v for w in writes]),
        stored_k=of([w.stored_k for w in writes]),
        stored_v=of([w.stored_v for w in writes]),
        encoded_k=codes([w.encoded_k for w in writes]),
        encoded_v=codes([w.encoded_v for w in writes]),
    )
