"""How another distribution joins: an entry point names an object, and what cannot be used is an error that names it.

witcert.plugins   a quantizer or a gate class, or a module (or an object) in which they are registered, or functions are
                  marked with hookimpl; loaded at every start
witcert.tasks     a task source, for `witcert eval`
witcert.engines   what an engine's adapter says about itself, a function, for `witcert doctor`
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from witcert_core.errors import PluginError

PLUGINS = "witcert.plugins"
TASKS = "witcert.tasks"
ENGINES = "witcert.engines"


def found(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group that are installed."""
    return tuple(entry_points(group=group))


def distribution(entry: EntryPoint) -> str:
    """Name and version of the distribution that brings an entry point."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"


def described(entry: EntryPoint) -> str:
    """An entry point as an error names it."""
    return f"{entry.group} entry point {entry.name!r} of {distribution(entry)} ({entry.value})"


def unusable(entry: EntryPoint, error: BaseException) -> PluginError:
    """The error of an entry point that cannot be loaded or used: a server must not start with it silently missing."""
    cause = " ".join(str(error).split())
    return PluginError(f"{described(entry)} failed to load: {type(error).__name__}: {cause}; fix or uninstall it")


def load(entry: EntryPoint) -> Any:
    """The object an entry point names; PluginError if its import fails, whatever it raises."""
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        raise unusable(entry, error) from error
