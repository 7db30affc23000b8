"""The private names of an engine that its adapter relies on, and the check that each is still what it was.

An adapter lists them in one table; `witcert doctor` and a test of the adapter read it.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Signature:
    """A function or class whose parameters begin with these names.

    in_source: a method read off its module's source, which cannot be imported without a GPU.
    """

    target: str
    parameters: tuple[str, ...]
    in_source: bool = False


@dataclass(frozen=True)
class Members:
    """A class or module with these attributes (class attributes, fields, or set on `self` by one of its methods)."""

    target: str
    names: tuple[str, ...]


def broken(contract: Iterable[Signature | Members]) -> list[str]:
    """One line for every entry that the engine no longer keeps, beginning with the name that changed."""
    found = []
    for entry in contract:
        if isinstance(entry, Signature) and entry.in_source:
            if why := changed_in_source(entry):
                found.append(f"{entry.target}: {why}")
            continue
        try:
            owner = resolve(entry.target)
        except (ImportError, AttributeError) as error:
            found.append(f"{entry.target}: {error}")
            continue
        if isinstance(entry, Members):
            engine = entry.target.partition(".")[0]
            lost = [name for name in entry.names if not has_member(owner, name, engine)]
            found += [f"{entry.target}.{name}: no longer there" for name in lost]
        elif why := changed_parameters(owner, entry.parameters):
            found.append(f"{entry.target}: {why}")
    return found


def resolve(target: str) -> Any:
    """The object a dotted name means, as it was before anything wrapped it."""
    owner, _, name = target.rpartition(".")
    try:
        raw = inspect.getattr_static(pkgutil.resolve_name(owner), name)
    except AttributeError:
        raw = pkgutil.resolve_name(target)  # a module nobody has imported yet
    return inspect.unwrap(raw.__func__ if isinstance(raw, classmethod | staticmethod) else raw)


def changed_parameters(function: Any, expected: tuple[str, ...]) -> str:
    """What is different about the leading parameters of a function, or ''."""
    found = [name for name in inspect.signature(function).parameters if name != "cls" or "cls" in expected]
    return difference(found, expected)


def difference(found: list[str], expected: tuple[str, ...]) -> str:
    if tuple(found[: len(expected)]) == expected:
        return ""
    return f"takes ({', '.join(found)}), expected ({', '.join(expected)}, ...)"


def changed_in_source(entry: Signature) -> str:
    """The same for a method whose module is read, not imported."""
    module, owner, method = entry.target.rsplit(".", 2)
    try:
        spec = importlib.util.find_spec(module)
    except ImportError as error:
        return str(error)
    if spec is None or spec.origin is None:
        return "no such module"
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            for function in node.body:
                if isinstance(function, ast.FunctionDef) and function.name == method:
                    return difference([arg.arg for arg in function.args.args], entry.parameters)
    return "no longer there"


def has_member(owner: Any, name: str, engine: str) -> bool:
    """Whether a class or module of `engine` has an attribute, has a field, or sets it on its instances."""
    if hasattr(owner, name):
        return True
    for cls in getattr(owner, "__mro__", ()):
        if name in vars(cls).get("__annotations__", {}):
            return True
        if cls.__module__.startswith(engine) and sets_on_self(cls, name):
            return True
    return False


def sets_on_self(cls: Any, name: str) -> bool:
    return re.search(rf"\bself\.{name}(\s*:[^=\n]+)?\s*=(?!=)", source(cls)) is not None


@functools.cache
def source(cls: Any) -> str:
    return inspect.getsource(cls)
