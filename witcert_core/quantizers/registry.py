"""Which quantizers exist, by the name a policy uses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from inspect import isabstract, isclass
from typing import Any, get_args

from witcert_core.errors import QuantizerError, did_you_mean, listed
from witcert_core.quantizers.base import CalibratedQuantizer, DitheredQuantizer, Quantizer, Space, State, Tier
from witcert_core.quantizers.parameters import checked, parameters, required

NAME = re.compile(r"[a-z][a-z0-9_.+-]*")
"""What quantizers and gates may be called."""
_BUILTIN_PACKAGE = "witcert_core"


class QuantizerRegistry:
    """Name -> quantizer class. Every record is checked when it is registered, not when it is used."""

    def __init__(self) -> None:
        self._classes: dict[str, type[Quantizer]] = {}
        self._distributions: dict[str, str] = {}  # top-level package -> "distribution version"

    def register(self, cls: type[Quantizer]) -> type[Quantizer]:
        """Add a class. Registering it again is a no-op; another class under its name is an error."""
        _check_class(cls)
        known = self._classes.get(cls.name)
        if known is not None and origin(known) != origin(cls):
            raise QuantizerError(
                f"quantizer name {cls.name!r} is taken: {origin(known)} has it, {origin(cls)} wants it; "
                "rename one of them or uninstall its distribution"
            )
        self._classes[cls.name] = cls
        return cls

    def note_distribution(self, package: str, distribution: str) -> None:
        """Remember which distribution ('name version') brought a top-level package; for `source`."""
        self._distributions[package] = distribution

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._classes))

    def from_package(self, package: str) -> tuple[str, ...]:
        """The names of the quantizers whose classes live in a top-level package."""
        return tuple(n for n, cls in self._classes.items() if cls.__module__.partition(".")[0] == package)

    def cls(self, name: str) -> type[Quantizer]:
        """The class registered as `name`; QuantizerError lists the known ones otherwise."""
        if name not in self._classes:
            raise QuantizerError(
                f"unknown quantizer {name!r}{did_you_mean(name, self._classes)}; "
                f"known: {listed(self.names())}; another one comes with its plugin distribution"
            )
        return self._classes[name]

    def get(self, name: str, params: Mapping[str, Any] | None = None) -> Quantizer:
        """An instance with `params`; unknown, missing and ill-typed parameters are refused by name."""
        cls = self.cls(name)
        given = checked(f"quantizer {name!r}", cls, params or {}, parameters(cls), QuantizerError)
        try:
            return cls(**given)
        except (TypeError, ValueError) as error:
            raise QuantizerError(f"quantizer {name!r}: parameters {given!r} refused: {error}") from error

    def parameters(self, name: str) -> tuple[str, ...]:
        """The names a policy may put into `quantizer.params`."""
        return parameters(self.cls(name))

    def required(self, name: str) -> tuple[str, ...]:
        """Those of its parameters that have no default."""
        return required(self.cls(name))

    def source(self, name: str) -> str:
        """The distribution and version that brought a quantizer, or its module when that is not known."""
        module = self.cls(name).__module__
        package = module.partition(".")[0]
        if package == _BUILTIN_PACKAGE:
            return "witcert (built in)"
        return self._distributions.get(package, f"module {module}")


def origin(cls: type) -> str:
    """Module and name of a class; one that is defined again, in a notebook, is another class of the same origin."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _check_class(cls: object) -> None:
    if not isclass(cls) or not issubclass(cls, Quantizer):
        raise QuantizerError(f"cannot register {cls!r}: not a subclass of witcert_core.Quantizer")
    where = origin(cls)
    if isabstract(cls):
        missing = listed(sorted(getattr(cls, "__abstractmethods__", ())))
        raise QuantizerError(f"cannot register {where}: it does not define {missing}")
    params = getattr(cls, "__dataclass_params__", None)
    if not is_dataclass(cls) or "__dataclass_params__" not in vars(cls) or not getattr(params, "frozen", False):
        raise QuantizerError(f"cannot register {where}: decorate it with @dataclass(frozen=True)")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise QuantizerError(f"cannot register {where}: name is {name!r}; expected {NAME.pattern}")
    for flag, allowed in (("space", get_args(Space)), ("state", get_args(State)), ("tier", get_args(Tier))):
        if getattr(cls, flag) not in allowed:
            raise QuantizerError(
                f"cannot register {where}: {flag} is {getattr(cls, flag)!r}; allowed: {listed(allowed)}"
            )
    if not isinstance(cls.token_group, int) or cls.token_group < 1:
        raise QuantizerError(f"cannot register {where}: token_group is {cls.token_group!r}; expected >= 1")
    if (cls.tier == "probabilistic") != issubclass(cls, DitheredQuantizer):
        raise QuantizerError(
            f"cannot register {where}: tier is {cls.tier!r}, but only a DitheredQuantizer, whose error "
            "follows the dither law by construction, has tier 'probabilistic'"
        )
    if (cls.state == "request") != issubclass(cls, CalibratedQuantizer):
        raise QuantizerError(
            f"cannot register {where}: state is {cls.state!r}, but a CalibratedQuantizer, which says what it is "
            "calibrated on, is what has state 'request'"
        )
    if cls.tier == "probabilistic" and (cls.space != "post_rope" or cls.token_group != 1 or cls.state != "none"):
        raise QuantizerError(
            f"cannot register {where}: a dithered quantizer on {cls.space} keys, groups of {cls.token_group} and "
            f"state {cls.state!r}; the dither's law is known for single tokens after RoPE without state"
        )


REGISTRY = QuantizerRegistry()
"""The registry of this process: built-in quantizers, decorated functions and plugins."""
