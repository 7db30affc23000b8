"""A function of vLLM that is wrapped, and how."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from witcert_core.errors import UnsupportedError

_MARK = "__witcert_original__"


@dataclass(frozen=True)
class Hook:
    """A function of vLLM that is wrapped: `function(original, *args, **kwargs)` runs in its place.

    parameters: the leading parameter names it had when this adapter was written; the version contract compares them.
    """

    target: str
    function: Callable[..., Any]
    parameters: tuple[str, ...]


def apply(hook: Hook) -> None:
    """Put the wrapper in place, once; UnsupportedError if vLLM has no such function."""
    owner_name, _, name = hook.target.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    original = getattr(owner, name, None)
    if original is None:
        raise UnsupportedError(
            f"vLLM has no {hook.target}: this vLLM differs from the tested one; install the version that "
            "docs/limits.md names, or unset WITCERT_POLICY to serve without a meter"
        )
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook.function(original, *args, **kwargs)

    setattr(wrapper, _MARK, original)
    setattr(owner, name, wrapper)
