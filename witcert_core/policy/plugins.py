"""Plugins: what they can hook, and how they are found.

A distribution joins through the entry-point group `witcert.plugins`. Its entry point is a module (or
an object) with @hookimpl functions, or simply the module whose @quantizer functions register on import.
pluggy works at plan time only: the hot path gets plain tuples of callables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from witcert_core.errors import PluginError, did_you_mean, listed
from witcert_core.meter.cells import CellBatch
from witcert_core.policy.gate_registry import GATES, GateRegistry
from witcert_core.quantizers import REGISTRY, QuantizerRegistry
from witcert_core.quantizers.base import Tier


@dataclass(frozen=True)
class CellEvent:
    """What witcert_on_cell gets: the H cells of one query row in one layer, `cells` at index `row`.

    step counts the request's rows from 1; position is the row's token position; layer is a global id,
    and query head h of the batch is head_offset + h.
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
ENTRY_POINT_GROUP = "witcert.plugins"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class WitCertHooks:
    """The hook specifications."""

    @hookspec
    def witcert_register_quantizers(self, registry: QuantizerRegistry) -> None:
        """Called once when plugins are loaded: registry.register(MyQuantizer)."""

    @hookspec
    def witcert_register_gates(self, registry: GateRegistry) -> None:
        """Called once when plugins are loaded: registry.register(MyGate)."""

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
    return load_plugins(entry_points(group=ENTRY_POINT_GROUP), REGISTRY, GATES)


def quantizer_registry() -> QuantizerRegistry:
    """All quantizers, those of installed plugins included."""
    plugin_manager()
    return REGISTRY


def gate_registry() -> GateRegistry:
    """All gates, those of installed plugins included."""
    plugin_manager()
    return GATES


def load_plugins(
    found: Iterable[EntryPoint], quantizers: QuantizerRegistry, gates: GateRegistry
) -> pluggy.PluginManager:
    """A new manager with the plugins of these entry points, their quantizers and gates registered.

    A plugin that fails is an error that names its distribution and the cause: a server must not start
    with a method silently missing.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(WitCertHooks)
    for entry in found:
        _load_one(manager, entry, quantizers, gates)
    return manager


def cell_observers(manager: pluggy.PluginManager) -> tuple[Callable[[CellEvent], None], ...]:
    """The witcert_on_cell functions as plain callables; empty when nobody listens."""
    return _plain(manager.hook.witcert_on_cell, "event")


def report_observers(manager: pluggy.PluginManager) -> tuple[Callable[[dict[str, Any]], None], ...]:
    """The witcert_report functions as plain callables; empty when nobody listens."""
    return _plain(manager.hook.witcert_report, "summary")


def _load_one(
    manager: pluggy.PluginManager, entry: EntryPoint, quantizers: QuantizerRegistry, gates: GateRegistry
) -> None:
    distribution = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"
    where = f"plugin {entry.name!r} of {distribution} ({entry.value})"
    package = entry.module.partition(".")[0]
    quantizers.note_distribution(package, distribution)
    try:
        plugin = entry.load()
        name = manager.register(plugin, name=f"{distribution}:{entry.name}")
        _refuse_unknown_hooks(manager, plugin)
        others = [p for p in manager.get_plugins() if p is not plugin]
        manager.subset_hook_caller("witcert_register_quantizers", others)(registry=quantizers)
        manager.subset_hook_caller("witcert_register_gates", others)(registry=gates)
    except (Exception, SystemExit) as error:
        cause = " ".join(str(error).split())
        raise PluginError(f"{where} failed to load: {type(error).__name__}: {cause}; fix or uninstall it") from error
    if not manager.get_hookcallers(plugin) and not quantizers.from_package(package):
        raise PluginError(f"{where} brings nothing ({name}): it has no @hookimpl function and no @quantizer function")


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
    """The function as a plain callable whose failure says whose it is."""

    def call(given: Any) -> None:
        try:
            function(given) if takes else function()
        except Exception as error:
            cause = " ".join(str(error).split())
            raise PluginError(f"{where} failed: {type(error).__name__}: {cause}; fix or uninstall it") from error

    return call
