"""What a repairer asks of whatever remembers the tokens in the slots of a cache."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from witcert_core.meter.protocols import Radii


class SlotErrors(Radii, Protocol):
    """The tokens of one layer, of all KV heads or of one."""

    def head(self, kv_head: int) -> SlotErrors:
        """The same for one KV head."""
        ...

    def exact_heads(self, slots: Tensor) -> Tensor:
        """bool [S, Hkv]: heads whose key and value have radius 0 in `slots` [S]."""
        ...

    def mark_exact(self, slots: Tensor) -> None:
        """What is read from `slots` [N] is now what the run handed over."""
        ...


class StoredErrors(Protocol):
    """All layers, by global id."""

    def __getitem__(self, layer: int) -> SlotErrors: ...


class Pool(Protocol):
    """S slots of one layer; k [S, Hkv, D], v [S, Hkv, Dv] in the pool's dtype. What is read is what attention reads."""

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values in `slots` [S]."""
        ...

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store all heads of `slots` [S]."""
        ...

    def restore(self, layer: int, slots: Tensor, head: int, k: Tensor, v: Tensor) -> None:
        """Store one head of `slots`: k [S, D], v [S, Dv]."""
        ...
