"""What a repairer asks of whatever remembers the tokens in the slots of a cache."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from witcert_core.meter import Radii


class Side(Radii, Protocol):
    """The tokens of one layer, of all KV heads or of one."""

    def head(self, kv_head: int) -> Side:
        """The same for one KV head."""
        ...

    def exact_heads(self, slots: Tensor) -> Tensor:
        """bool [S, Hkv]: heads whose key and value have radius 0 in `slots` [S]."""
        ...

    def mark_exact(self, slots: Tensor) -> None:
        """What is read from `slots` is now what the run handed over."""
        ...


class Sides(Protocol):
    """All layers, by global id."""

    def __getitem__(self, layer: int) -> Side: ...
