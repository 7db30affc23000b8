"""Which gates exist, by the name a policy uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from inspect import isclass
from typing import Any

from witcert_core.errors import PluginError, did_you_mean, listed
from witcert_core.policy.gates import Certified, Combined, Gate, Observe, RiskRanked
from witcert_core.quantizers.parameters import checked, parameters
from witcert_core.quantizers.registry import NAME, origin

SHARED = ("target", "tau", "tau_out", "risk_tau")
"""Keys of a policy's `gate` section that a gate has a field for if it wants their values."""


class GateRegistry:
    """Name -> gate class. A gate that repairs needs every cell, so a policy forces stride 1 for it."""

    def __init__(self) -> None:
        self._classes: dict[str, type[Gate]] = {}
        for builtin in (Observe, Certified, RiskRanked, Combined):
            self.register(builtin)

    def register(self, cls: type[Gate]) -> type[Gate]:
        """Add a frozen dataclass with name, repairs and decide; PluginError if it is none or its name taken.

        Its fields get their values from the keys of the policy's `gate` section with the same names, others from its
        `params`. Registering it again is a no-op; another class under its name is an error.
        """
        check_class(cls)
        known = self._classes.get(cls.name)
        if known is not None and origin(known) != origin(cls):
            raise PluginError(
                f"gate name {cls.name!r} is taken: {origin(known)} has it, {origin(cls)} wants it; "
                "rename one of them or uninstall its distribution"
            )
        self._classes[cls.name] = cls
        return cls

    def from_package(self, package: str) -> tuple[str, ...]:
        """The names of the gates whose classes live in a top-level package."""
        return tuple(n for n, cls in self._classes.items() if cls.__module__.partition(".")[0] == package)

    def names(self) -> tuple[str, ...]:
        return tuple(self._classes)

    def cls(self, name: str) -> type[Gate]:
        """The class registered as `name`; PluginError lists the known ones otherwise."""
        if name not in self._classes:
            raise PluginError(
                f"unknown gate {name!r}{did_you_mean(name, self._classes)}; known: {listed(self._classes)}"
            )
        return self._classes[name]

    def parameters(self, name: str) -> tuple[str, ...]:
        """The names a policy may put into `gate.params`: the fields that no key of the `gate` section is for."""
        return tuple(key for key in parameters(self.cls(name)) if key not in SHARED)

    def build(self, name: str, settings: Mapping[str, Any], params: Mapping[str, Any] | None = None) -> Gate:
        """The gate with the settings it has fields for (the others are the caller's: budget, block size) and `params`.

        PluginError for a parameter that is unknown, missing or ill-typed, and for values that the gate itself refuses.
        """
        cls: Any = self.cls(name)
        own = checked(f"gate {name!r}", cls, params or {}, self.parameters(name), PluginError)
        given = {key: settings[key] for key in parameters(cls) if key in settings} | own
        try:
            gate: Gate = cls(**given)
        except (TypeError, ValueError) as error:
            raise PluginError(f"gate {name!r}: parameters {given!r} refused: {error}") from error
        return gate


def check_class(cls: object) -> None:
    """PluginError unless it is a frozen dataclass with name, repairs and decide."""
    frozen = getattr(getattr(cls, "__dataclass_params__", None), "frozen", False)
    if not isclass(cls) or not is_dataclass(cls) or not frozen or not callable(getattr(cls, "decide", None)):
        raise PluginError(f"{cls!r} is no gate: expected a frozen dataclass with a method decide")
    name, repairs = getattr(cls, "name", None), getattr(cls, "repairs", None)
    if not isinstance(name, str) or not NAME.fullmatch(name) or not isinstance(repairs, bool):
        raise PluginError(
            f"{origin(cls)} is no gate: name is {name!r}, repairs is {repairs!r}; expected class variables, a text "
            f"that fits {NAME.pattern} and a bool"
        )


GATES = GateRegistry()
"""The gates of this process."""
