"""Every error this package raises on purpose, each with a one-line message.

A message says what was wrong, the offending value, what is allowed, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


class WitCertError(Exception):
    """Base of all deliberate errors; catch this to catch them all.

    Example:
        >>> import witcert_core as wc
        >>> try:
        ...     wc.RotarySpec(head_dim=0)
        ... except wc.WitCertError as error:
        ...     print(error)
        head_dim is 0; it must be at least 1
    """


class InputError(WitCertError, ValueError):
    """A tensor or number handed to the core has an impossible shape, dtype or value."""


class PolicyError(WitCertError, ValueError):
    """A policy file is malformed or asks for a combination that has no meaning.

    Example:
        >>> import witcert_core as wc
        >>> wc.load_policy("no/such/file.yaml")
        Traceback (most recent call last):
        ...
        witcert_core.errors.PolicyError: no/such/file.yaml: cannot be read: No such file or directory
    """


class UnsupportedError(WitCertError):
    """The engine, model or cache cannot be metered soundly, so it is refused.

    Example:
        >>> import witcert_core as wc
        >>> policy = wc.Policy(version=1, quantizer={"name": "none"}, gate={"on_exhausted": "abort"})
        >>> try:
        ...     wc.meter(None, policy=policy)
        ... except wc.UnsupportedError as error:
        ...     print(str(error).partition(",")[0])
        gate.on_exhausted is 'abort'
    """


class QuantizerError(WitCertError, ValueError):
    """A quantizer is unknown, has bad parameters, or returned something unusable.

    Example:
        >>> import witcert_core as wc
        >>> @wc.quantizer("Not A Name")
        ... def halves(x):
        ...     return x / 2
        Traceback (most recent call last):
        ...
        witcert_core.errors.QuantizerError: cannot register __main__.halves: name is 'Not A Name'; expected ...
    """


class BudgetError(WitCertError, ValueError):
    """A failure-probability budget is outside the range in which its claim has a meaning."""


class VectorFileError(WitCertError, ValueError):
    """A file of test vectors cannot be read as such."""


class PluginError(WitCertError):
    """A plugin distribution cannot be loaded, or implements a hook that does not exist.

    Example:
        >>> import witcert_core as wc
        >>> wc.register(int)
        Traceback (most recent call last):
        ...
        witcert_core.errors.PluginError: cannot register <class 'int'>: it is no subclass of ...
    """


class ProbeError(WitCertError, ValueError):
    """The text of a probe asks what cannot be asked; `column` [1...] is the place in it."""

    def __init__(self, column: int, message: str) -> None:
        super().__init__(f"probe, column {column}: {message}")
        self.column = column


class ReportError(WitCertError):
    """A report cannot be written, or was handed numbers of another model."""


_VALUE_LENGTH = 80


_YAML_WORDS = ((None, "null"), (True, "true"), (False, "false"))


def allowed_by(detail: ErrorDetails) -> str:
    """What pydantic would have accepted, without its introduction."""
    if detail["type"] == "string_too_short":
        return "text that is not empty"
    if detail["type"] == "string_pattern_mismatch":
        return "text without a zero byte"
    return detail["msg"].removeprefix("Input should be ").partition(", unable to parse")[0]


def yaml_word(value: object) -> str:
    """A value as it is written in YAML, cut where it is long."""
    if isinstance(value, int) and abs(value) >= 10**_VALUE_LENGTH:
        return f"an integer of {value.bit_length()} bits"
    text = next((word for known, word in _YAML_WORDS if value is known), None) or repr(value)
    return text if len(text) <= _VALUE_LENGTH else f"{text[:_VALUE_LENGTH]}..."


def did_you_mean(given: object, allowed: Iterable[str]) -> str:
    """' (did you mean 'x'?)' for the closest allowed word, whatever its case; '' when none is close."""
    words = {word.casefold(): word for word in allowed}
    close = get_close_matches(str(given).casefold(), list(words), n=1, cutoff=0.6)
    return f" (did you mean {words[close[0]]!r}?)" if close else ""


def listed(allowed: Iterable[str]) -> str:
    """The allowed words as one comma-separated line."""
    return ", ".join(allowed)
