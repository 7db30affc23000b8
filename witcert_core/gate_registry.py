"""Which gates exist, by the name a policy uses, and which of them repair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from witcert_core.errors import PluginError
from witcert_core.suggest import did_you_mean, listed


@dataclass(frozen=True)
class GateEntry:
    """A gate class (None for the built-in ones, which live in gates.py) and whether it repairs blocks."""

    name: str
    repairs: bool
    cls: type[Any] | None = None


class GateRegistry:
    """Name -> gate. A gate that repairs needs every cell, so the policy forces stride 1 for it."""

    def __init__(self) -> None:
        self._entries = {
            entry.name: entry
            for entry in (
                GateEntry("observe", repairs=False),
                GateEntry("certified", repairs=True),
                GateEntry("risk_ranked", repairs=True),
                GateEntry("combined", repairs=True),
            )
        }

    def register(self, name: str, cls: type[Any], *, repairs: bool) -> None:
        """Add a gate class; PluginError if the name is taken by another one."""
        known = self._entries.get(name)
        if known is not None and known.cls is not cls:
            raise PluginError(f"gate name {name!r} is taken; choose another than {listed(self.names())}")
        self._entries[name] = GateEntry(name, repairs, cls)

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def get(self, name: str) -> GateEntry:
        """The gate called `name`; PluginError lists the known ones otherwise."""
        if name not in self._entries:
            raise PluginError(
                f"unknown gate {name!r}{did_you_mean(name, self._entries)}; known: {listed(self.names())}"
            )
        return self._entries[name]


GATES = GateRegistry()
"""The gates of this process."""
