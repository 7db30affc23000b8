"""The engine's pool as the caches of the core reach it: by layer and slot, whatever its layout."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Pool(Protocol):
    """S slots of one layer; k [S, Hkv, D], v [S, Hkv, Dv] in the pool's dtype. What is read is what attention reads."""

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values in `slots` [S]."""
        ...

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store all heads of `slots`."""
        ...

    def restore(self, layer: int, slots: Tensor, head: int, k: Tensor, v: Tensor) -> None:
        """Store one head of `slots`: k [S, D], v [S, Dv]."""
        ...
