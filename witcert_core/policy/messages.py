"""pydantic's findings as one line a user can act on: key path, value, what is allowed, what was meant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from witcert_core.errors import allowed_by, did_you_mean, listed, yaml_word

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def describe_validation_error(error: ValidationError, model: type[BaseModel]) -> str:
    """All findings, separated by '; '."""
    return "; ".join(dict.fromkeys(_describe(detail, model) for detail in error.errors()))


def _describe(detail: ErrorDetails, model: type[BaseModel]) -> str:
    path = ".".join(str(part) for part in detail["loc"])
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        keys = _keys_beside(detail["loc"], model)
        return f"{path}: unknown key{did_you_mean(detail['loc'][-1], keys)}; allowed: {listed(keys)}"
    if kind == "missing":
        return f"{path}: is missing; it has no default"
    if kind == "value_error" and not path:
        return str(context["error"])
    if kind == "value_error":
        return f"{path}: {context['error']}"
    if kind == "invalid_key" or detail["loc"][-1] == "[key]":
        return f"{'.'.join(map(str, detail['loc'][:-2]))}: has the key {yaml_word(detail['input'])}, which is no text"
    value = yaml_word(detail["input"])
    if kind == "literal_error":
        allowed = str(context["expected"])
        words = [word.strip("' ") for word in allowed.replace(" or ", ", ").split(",")]
        meant = "" if detail["input"] in words else did_you_mean(detail["input"], words)  # '1' is not 1
        return f"{path}: is {value}{meant}; allowed: {allowed}"
    if kind in ("model_type", "model_attributes_type"):
        return f"{path}: is {value}; allowed: a mapping with the keys {listed(_keys_of(detail['loc'], model))}"
    return f"{path}: is {value}; allowed: {allowed_by(detail)}"


def _keys_beside(loc: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    return _keys_of(loc[:-1], model)


def _keys_of(loc: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    current: Any = model
    for part in loc:
        current = current.model_fields[part].annotation
    return list(current.model_fields)
