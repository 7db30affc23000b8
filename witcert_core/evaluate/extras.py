"""Packages that only the evaluation needs; they come with the extra `witcert[eval]`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from witcert_core.errors import UnsupportedError


def require(module: str) -> Any:
    """The module, or UnsupportedError that names the extra to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        raise UnsupportedError(f"{package} is not installed; it comes with: pip install 'witcert[eval]'") from error
