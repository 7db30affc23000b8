"""Parameters from a policy for a dataclass of somebody's: named, typed and complete, or refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from witcert_core.errors import WitCertError, allowed_by, did_you_mean, listed, yaml_word


def parameters(cls: Any) -> tuple[str, ...]:
    """The fields of a dataclass that can be given."""
    return tuple(field.name for field in fields(cls) if field.init)


def required(cls: Any) -> tuple[str, ...]:
    """Those of them that have no default."""
    return tuple(field.name for field in fields(cls) if field.init and not _has_default(field))


def checked(
    who: str, cls: Any, given: Mapping[str, Any], allowed: Iterable[str], error: type[WitCertError]
) -> dict[str, Any]:
    """`given` as the types that `cls` declares, taken strictly; `error` for a name not allowed, an ill-typed value or a
    parameter missing, in the name of `who`."""
    hints = get_type_hints(cls)
    accepted = {key: hints[key] for key in allowed}
    found = dict(given)
    for key, value in given.items():
        if key not in accepted:
            raise error(
                f"{who}: unknown parameter {key!r}{did_you_mean(key, accepted)}; allowed: {listed(accepted) or 'none'}"
            )
        try:
            found[key] = TypeAdapter(accepted[key], config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError as refusal:
            words = allowed_by(refusal.errors()[0])
            raise error(f"{who}: parameter {key!r} is {yaml_word(value)}; allowed: {words}") from refusal
    missing = [key for key in required(cls) if key in accepted and key not in found]
    if missing:
        raise error(f"{who}: parameter {missing[0]!r} is missing; it has no default")
    return found


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING
