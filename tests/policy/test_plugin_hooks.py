"""Plugins: found by entry point, checked when loaded, named when they fail; observers as plain callables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from importlib.metadata import EntryPoint, PathDistribution
from pathlib import Path
from typing import Any, ClassVar

import pluggy
import pytest
import torch

from witcert_core import CellBatch, CellEvent, PluginError, register
from witcert_core.policy.gate_registry import GateRegistry
from witcert_core.policy.plugins import cell_observers, load_plugins, plugin_manager, report_observers
from witcert_core.quantizers import QuantizerRegistry

Install = Callable[..., EntryPoint]

QUANTIZER = """
from dataclasses import dataclass
from typing import ClassVar
from witcert_core import Quantizer, register

@register
@dataclass(frozen=True)
class Mine(Quantizer):
    name: ClassVar[str] = "mine"
    def fake_quantize(self, x, *, kind, layer, positions, ctx):
        return x.clone()
"""
GATE = """
from dataclasses import dataclass
from typing import ClassVar
from witcert_core import register
@dataclass(frozen=True)
class Mine:
    tau: float = 0.5
    mine: int = 3
    name: ClassVar[str] = "mine"
    repairs: ClassVar[bool] = True
    def decide(self, state): ...
"""


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> tuple[QuantizerRegistry, GateRegistry]:
    """Empty ones in place of the process's."""
    fresh = QuantizerRegistry(), GateRegistry()
    monkeypatch.setattr("witcert_core.policy.plugins.REGISTRY", fresh[0])
    monkeypatch.setattr("witcert_core.policy.plugins.GATES", fresh[1])
    return fresh


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Write a module and its distribution's metadata; return the entry point an installer would have made."""
    monkeypatch.syspath_prepend(tmp_path)
    modules: list[str] = []

    def write(module: str, source: str, names: str = "") -> EntryPoint:
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-2.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{module}\nVersion: 2.5\n")
        (info / "entry_points.txt").write_text(f"[witcert.plugins]\nplug = {module}{names}\n")
        modules.append(module)
        (entry,) = PathDistribution(info).entry_points
        return entry

    yield write
    for module in modules:
        sys.modules.pop(module, None)


def load(*entries: EntryPoint) -> pluggy.PluginManager:
    return load_plugins(entries)


@pytest.mark.parametrize("names", ["", ":Mine"])
def test_an_entry_point_names_a_quantizer_or_its_module(
    install: Install, registries: tuple[QuantizerRegistry, GateRegistry], names: str
) -> None:
    load(install("plug_quant", QUANTIZER, names))
    assert registries[0].names() == ("mine",)
    assert registries[0].source("mine") == "dist-plug_quant 2.5"


@pytest.mark.parametrize("names", ["", ":Mine"])
def test_an_entry_point_names_a_gate_or_its_module(
    install: Install, registries: tuple[QuantizerRegistry, GateRegistry], names: str
) -> None:
    load(install("plug_gate", GATE.replace("@data", "@register\n@data") if not names else GATE, names))
    assert registries[1].names() == ("observe", "certified", "risk_ranked", "combined", "mine")
    gate = registries[1].build("mine", {"tau": 0.25, "target": "tv"}, {"mine": 4})
    assert (gate.tau, gate.mine, gate.repairs) == (0.25, 4, True)  # type: ignore[attr-defined]


def test_what_is_no_quantizer_and_no_gate_is_not_registered() -> None:
    with pytest.raises(PluginError, match=r"no subclass of witcert_core.Quantizer and no gate with a method decide"):
        register(int)


@dataclass(frozen=True)
class TakenName:
    name: ClassVar[str] = "combined"
    repairs: ClassVar[bool] = False

    def decide(self, state: object) -> None: ...


@dataclass(frozen=True)
class NoFlag:
    name: ClassVar[str] = "no_flag"

    def decide(self, state: object) -> None: ...


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (TakenName, "gate name 'combined' is taken"),
        (NoFlag, "name is 'no_flag', repairs is None"),
        (dataclass(frozen=True)(type("BadName", (TakenName,), {"name": "No Good"})), "name is 'No Good'"),
        (int, "expected a frozen dataclass with a method decide"),
    ],
)
def test_bad_gates_are_refused(record: type, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        GateRegistry().register(record)


def test_a_gate_that_is_defined_again_takes_the_place_of_the_old_one() -> None:
    """As in a notebook, and as quantizers do."""
    registry = GateRegistry()
    for tau in (0.1, 0.2):
        own = {"tau": tau, "name": "again", "repairs": False, "decide": lambda self, state: None}
        cls: Any = dataclass(frozen=True)(type("Again", (), {"__annotations__": {"tau": float}, **own}))
        registry.register(cls)
        assert registry.build("again", {}) == cls()


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import no_such_engine_extra", "ModuleNotFoundError: No module named 'no_such_engine_extra'"),
        ("raise RuntimeError('needs\\n a GPU')", "RuntimeError: needs a GPU"),
        (
            "from witcert_core import hookimpl\n@hookimpl\ndef witcert_on_cells(event): pass",
            r"unknown hook 'witcert_on_cells' \(did you mean 'witcert_on_cell'\?\)",
        ),
        (
            "from witcert_core import hookimpl\n@hookimpl\ndef witcert_report(summery): pass",
            "Argument.*summery",
        ),
        (
            "from witcert_core import Quantizer, register\n@register\nclass Mine(Quantizer): pass",
            "QuantizerError: cannot register plug_bad.Mine",
        ),
        ("from witcert_core import hookimpl\n@hookimpl\ndef witcert_register_gates(registry): pass", "unknown hook"),
        ("x = 1", "brings nothing"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_plugin_that_fails_is_named_with_its_cause(install: Install, source: str, cause: str) -> None:
    entry = install("plug_bad", source)
    with pytest.raises(
        PluginError, match=rf"witcert.plugins entry point 'plug' of dist-plug_bad 2.5 \(plug_bad\).*{cause}"
    ) as raised:
        load(entry)
    assert "\n" not in str(raised.value)


def test_two_plugins_cannot_share_a_quantizer_name(install: Install) -> None:
    entries = install("plug_one", QUANTIZER), install("plug_two", QUANTIZER)
    with pytest.raises(PluginError, match=r"dist-plug_two 2.5.*name 'mine' is taken: plug_one.Mine has it"):
        load(*entries)


def test_observers_are_plain_callables_in_order(install: Install) -> None:
    source = """
from witcert_core import hookimpl
seen = []
@hookimpl
def witcert_on_cell(event):
    seen.append(event)
@hookimpl
def witcert_report():
    seen.append("report")
"""
    manager = load(install("plug_seen", source))
    for observer in cell_observers(manager):
        observer("event")  # type: ignore[arg-type]
    for reporter in report_observers(manager):
        reporter({})
    assert sys.modules["plug_seen"].seen == ["event", "report"]


def test_an_observer_that_writes_to_what_it_is_shown_is_named(install: Install) -> None:
    """Other rows of its batch are counted after it."""
    source = """
from witcert_core import hookimpl
@hookimpl
def witcert_on_cell(event):
    event.cells.meter[event.row] *= 100
"""
    (observer,) = cell_observers(load(install("plug_percent", source)))
    ones = torch.ones(1, 2)
    cells = CellBatch(**dict.fromkeys((field.name for field in fields(CellBatch)), ones.clone()) | {"meter": ones})
    with pytest.raises(PluginError, match=r"dist-plug_percent 2\.5:plug'?.*writes to meter of the cells it is shown"):
        observer(CellEvent("r", 0, 1, 1, "deterministic", 0, cells, 0))


@pytest.mark.parametrize("hook", ["witcert_on_cell(event)", "witcert_report(summary)", "witcert_report()"])
def test_an_observer_that_fails_is_named(install: Install, hook: str) -> None:
    source = f"from witcert_core import hookimpl\n@hookimpl\ndef {hook}:\n    raise RuntimeError('no\\ndisk')"
    manager = load(install("plug_fails", source))
    observers: list[Any] = [*cell_observers(manager), *report_observers(manager)]
    (observer,) = observers
    with pytest.raises(PluginError, match=r"plugin 'dist-plug_fails 2.5:plug': witcert_\w+ failed: .*no disk; fix"):
        observer({})


@dataclass(frozen=True)
class Needs:
    name: ClassVar[str] = "needs"
    repairs: ClassVar[bool] = True
    strength: float

    def __post_init__(self) -> None:
        if self.strength < 0:
            raise ValueError("strength is below 0")

    def decide(self, state: object) -> None: ...


@dataclass
class Thawed:
    name: ClassVar[str] = "thawed"
    repairs: ClassVar[bool] = True

    def decide(self, state: object) -> None: ...


def test_parameters_of_a_gates_own_are_checked_like_a_quantizers() -> None:
    gates = GateRegistry()
    gates.register(Needs)  # type: ignore[arg-type]
    for params, words in (
        ({}, "parameter 'strength' is missing"),
        ({"strenght": 2.0}, r"unknown parameter 'strenght' \(did you mean 'strength'\?\); allowed: strength"),
        ({"strength": "much"}, "parameter 'strength' is 'much'; allowed: a valid number"),
        ({"strength": -1.0}, "refused: strength is below 0"),
    ):
        with pytest.raises(PluginError, match=rf"gate 'needs': .*{words}"):
            gates.build("needs", {"tau": 0.2, "target": "tv"}, params)
    gate = gates.build("needs", {"tau": 0.2, "target": "tv"}, {"strength": 2.0})
    assert vars(gate) == {"strength": 2.0}
    with pytest.raises(PluginError, match="expected a frozen dataclass"):
        gates.register(Thawed)  # type: ignore[arg-type]


def test_observer_wrappers_are_refused(install: Install) -> None:
    source = "import pluggy\n@pluggy.HookimplMarker('witcert')(wrapper=True)\ndef witcert_on_cell(event):\n    yield"
    manager = load(install("plug_wrap", source))
    with pytest.raises(PluginError, match="witcert_on_cell cannot be a wrapper"):
        cell_observers(manager)


def test_the_process_has_one_manager() -> None:
    assert plugin_manager() is plugin_manager()
