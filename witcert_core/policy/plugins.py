"""Plugins: what they can bring, and how they are found.

A distribution joins through the entry-point group `witcert.plugins`. Its entry point names what it brings: a quantizer
or a gate class, or a module (or an object) in which `register`, `quantizer` or `hookimpl` mark what it has. pluggy
works at plan time only: the hot path gets plain tuples of callables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint
from inspect import isclass
from typing import Any, TypeVar, cast

import pluggy
from torch import Tensor

from witcert_core.errors import PluginError, did_you_mean, listed
from witcert_core.meter.cells import CellBatch
from witcert_core.policy import entry_points
from witcert_core.policy.gate_registry import GATES, GateRegistry
from witcert_core.policy.gates import Gate
from witcert_core.quantizers import REGISTRY, QuantizerRegistry
from witcert_core.quantizers.base import Quantizer, Tier

Class = TypeVar("Class", bound=type)
Function = TypeVar("Function", bound=Callable[..., object])


@dataclass(frozen=True)
class CellEvent:
    """What witcert_on_cell gets: the H cells of one query row in one layer, `cells` at index `row`.

    step counts the request's rows from 1; position is the row's token position; layer is a global id,
    and query head h of the batch is head_offset + h.

    Example:
        >>> import witcert_core as wc
        >>> @wc.hookimpl
        ... def witcert_on_cell(event: wc.CellEvent):
        ...     worst = event.cells.meter[event.row].max()
        ...     print(event.request_id, event.layer, event.position, float(worst))
    """

    request_id: str
    layer: int
    step: int
    position: int
    tier: Tier
    head_offset: int
    cells: CellBatch
    row: int
    repaired_blocks: int = 0


PROJECT = "witcert"

hookspec = pluggy.HookspecMarker(PROJECT)
_mark = pluggy.HookimplMarker(PROJECT)


def hookimpl(function: Function) -> Function:
    """Mark an observer: a function called `witcert_on_cell` or `witcert_report`, in what an entry point names.

    Example:
        >>> import witcert_core as wc
        >>> @wc.hookimpl
        ... def witcert_report(summary):
        ...     print(wc.render_sentence(summary))
    """
    return _mark(function)


def register(cls: Class) -> Class:
    """Make a quantizer or gate known under its `name`; a class decorator, above `@dataclass(frozen=True)`.

    Raises:
        QuantizerError: a quantizer that breaks the rules of its kind, or whose name is taken.
        PluginError: a gate that does, or a class that is neither.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch, witcert_core as wc
        >>> @wc.register
        ... @dataclass(frozen=True)
        ... class Watch:
        ...     name = "watch"
        ...     repairs = False
        ...     def decide(self, state):
        ...         return wc.GateDecision("accept", torch.zeros_like(state.meter, dtype=torch.int64))
        >>> wc.Policy(version=1, quantizer={"name": "none"}, gate={"kind": "watch"}).resolved_gate
        Watch()
    """
    if isclass(cls) and issubclass(cls, Quantizer):
        REGISTRY.register(cls)
    elif isclass(cls) and callable(getattr(cls, "decide", None)):
        GATES.register(cast("type[Gate]", cls))
    else:
        raise PluginError(
            f"cannot register {cls!r}: it is no subclass of witcert_core.Quantizer and no gate with a method decide"
        )
    return cls


class WitCertHooks:
    """The hook specifications."""

    @hookspec
    def witcert_on_cell(self, event: CellEvent) -> None:
        """One measured row of a layer, all heads at once. The tensors are shared: do not write to them."""

    @hookspec
    def witcert_report(self, summary: dict[str, Any]) -> None:
        """The summary of a request that finished (schema witcert.request/1)."""


_SPECS = tuple(name for name in vars(WitCertHooks) if name.startswith("witcert_"))


@cache
def plugin_manager() -> pluggy.PluginManager:
    """The plugin manager of this process, every installed plugin loaded; PluginError if one cannot be."""
    return load_plugins(entry_points.found(entry_points.PLUGINS))


def quantizer_registry() -> QuantizerRegistry:
    """All quantizers, those of installed plugins included."""
    plugin_manager()
    return REGISTRY


def gate_registry() -> GateRegistry:
    """All gates, those of installed plugins included."""
    plugin_manager()
    return GATES


def load_plugins(found: Iterable[EntryPoint]) -> pluggy.PluginManager:
    """A new manager with the plugins of these entry points, their quantizers and gates registered.

    A plugin that fails is an error that names its distribution and the cause: a server must not start
    with a method silently missing.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(WitCertHooks)
    for entry in found:
        _load_one(manager, entry)
    return manager


def cell_observers(manager: pluggy.PluginManager) -> tuple[Callable[[CellEvent], None], ...]:
    """The witcert_on_cell functions as plain callables; empty when nobody listens."""
    return _plain(manager.hook.witcert_on_cell, "event")


def report_observers(manager: pluggy.PluginManager) -> tuple[Callable[[dict[str, Any]], None], ...]:
    """The witcert_report functions as plain callables; empty when nobody listens."""
    return _plain(manager.hook.witcert_report, "summary")


def _load_one(manager: pluggy.PluginManager, entry: EntryPoint) -> None:
    package = entry.module.partition(".")[0]
    REGISTRY.note_distribution(package, entry_points.distribution(entry))
    plugin = entry_points.load(entry)
    try:
        if isclass(plugin):
            register(plugin)
            return
        manager.register(plugin, name=f"{entry_points.distribution(entry)}:{entry.name}")
        _refuse_unknown_hooks(manager, plugin)
    except Exception as error:
        raise entry_points.unusable(entry, error) from error
    if not (manager.get_hookcallers(plugin) or REGISTRY.from_package(package) or GATES.from_package(package)):
        raise PluginError(
            f"{entry_points.described(entry)} brings nothing: it is no class to register, and has nothing marked with "
            "register, quantizer or hookimpl"
        )


def _refuse_unknown_hooks(manager: pluggy.PluginManager, plugin: object) -> None:
    for caller in manager.get_hookcallers(plugin) or ():
        if not caller.has_spec():
            raise PluginError(
                f"unknown hook {caller.name!r}{did_you_mean(caller.name, _SPECS)}; hooks are {listed(_SPECS)}"
            )
    manager.check_pending()


def _plain(caller: pluggy.HookCaller, argument: str) -> tuple[Callable[[Any], None], ...]:
    functions: list[Callable[[Any], None]] = []
    for implementation in caller.get_hookimpls():
        if implementation.hookwrapper or implementation.wrapper:
            raise PluginError(
                f"plugin {implementation.plugin_name!r}: {caller.name} cannot be a wrapper; make it a plain function"
            )
        takes = argument in implementation.argnames
        where = f"plugin {implementation.plugin_name!r}: {caller.name}"
        functions.append(_named(implementation.function, takes, where))
    return tuple(functions)


def _named(function: Callable[..., object], takes: bool, where: str) -> Callable[[Any], None]:
    """The function as a plain callable whose failure says whose it is, and which may not write to cells: other rows of
    theirs are still to be counted."""

    def call(given: Any) -> None:
        before = _writes(given)
        try:
            function(given) if takes else function()
        except Exception as error:
            cause = " ".join(str(error).split())
            raise PluginError(f"{where} failed: {type(error).__name__}: {cause}; fix or uninstall it") from error
        if (after := _writes(given)) != before:
            written = listed(name for name in before if after[name] != before[name])
            raise PluginError(f"{where} writes to {written} of the cells it is shown; work on a clone, or uninstall it")

    return call


def _writes(given: Any) -> dict[str, int]:
    """How often each tensor of an event's cells was written to, as far as PyTorch counts."""
    fields = vars(given.cells) if isinstance(given, CellEvent) else {}
    return {name: x._version for name, x in fields.items() if isinstance(x, Tensor) and not x.is_inference()}
