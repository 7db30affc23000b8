"""The walls of the house: imports run downwards only, no circle, and an engine is imported by its adapter alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from witcert_core import serving

ROOT = Path(__file__).parents[2]
FLOORS = (
    ("_torch", "errors"),
    ("meter", "quantizers"),
    ("cache", "policy", "probes"),
    ("kernels", "report"),
    ("serving",),
    ("evaluate",),
    ("cli",),
)
"""Rooms of `witcert_core`, lowest floor first; rooms of one floor do not know each other."""
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
PACKAGES = {
    "witcert_core": ROOT / "witcert_core",
    "witcert_sglang": ROOT / "adapters" / "sglang" / "witcert_sglang",
    "witcert_vllm": ROOT / "adapters" / "vllm" / "witcert_vllm",
    "witcert_demo": ROOT / "demo" / "witcert_demo",
}
ENGINES = {"sglang", "vllm", "sgl_kernel"}


def modules(package: str) -> dict[str, Path]:
    """Dotted name -> file, of every module below a package."""
    root = PACKAGES[package]
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Every module of `known`, or top name outside it, that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else str(node.module)


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_every_room_of_the_core_has_a_floor() -> None:
    rooms = {room(name) for name in modules("witcert_core")} - {""}
    assert rooms == set(FLOOR)


def test_imports_of_the_core_run_downwards() -> None:
    known = modules("witcert_core")
    upwards = [
        f"{name} imports {other}"
        for name, path in known.items()
        for other in imported(path, known)
        if other.startswith("witcert_core.") and name != "witcert_core" and room(name) != room(other)
        if FLOOR[room(other)] >= FLOOR[room(name)]
    ]
    assert not upwards, "\n".join(upwards)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_imports_run_in_a_circle(package: str) -> None:
    known = modules(package)
    graph = {name: {other for other in imported(path, known) if other in known} for name, path in known.items()}
    for name in graph:
        # A package is loaded before its modules; what it imports from its own inside is no circle.
        graph[name] = {x for x in graph[name] if not x.startswith(f"{name}.") and not name.startswith(f"{x}.")}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_core_does_not_come_in_by_its_own_front_door() -> None:
    """The public surface stands above every room: to import it from one would be upwards, and a circle."""
    known = modules("witcert_core")
    assert not [name for name, path in known.items() if "witcert_core" in imported(path, known)]


def test_engines_are_imported_by_their_adapters_alone() -> None:
    adapters = {"witcert_sglang": {"sglang", "sgl_kernel"}, "witcert_vllm": {"vllm"}}
    core: dict[str, set[str]] = {"witcert_core": set()}
    for package, allowed in (core | adapters).items():
        known = modules(package)
        tops = {other.split(".")[0] for path in known.values() for other in imported(path, known)}
        assert tops & ENGINES <= allowed, package
        if package == "witcert_core":
            assert not tops & {"witcert_sglang", "witcert_vllm", "witcert_demo"}


PLUGINS = [path for folder in ("plugins", "examples") for path in sorted((ROOT / folder).glob("*/**/witcert_*.py"))]
PLUGINS += sorted((ROOT / "plugins").glob("*/witcert_*/*.py"))


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_plugin_imports_the_public_surface_and_its_own(path: Path) -> None:
    own = path.stem if path.stem.startswith("witcert_") else path.parent.name
    known = modules("witcert_core") | {"witcert_core": ROOT}
    ours = {other for other in imported(path, known) if other.startswith("witcert_")}
    assert {other.split(".")[0] for other in ours} <= {"witcert_core", own}
    assert {other for other in ours if other.startswith("witcert_core")} <= {"witcert_core"}


DOOR = ROOT / "witcert_core" / "serving" / "__init__.py"


@pytest.mark.parametrize("package", ["witcert_sglang", "witcert_vllm"])
def test_an_adapter_comes_in_by_one_door(package: str) -> None:
    """`witcert_core.serving` (its names, and its module of HTTP), the public surface and the errors."""
    core = modules("witcert_core") | {"witcert_core": DOOR}
    allowed = {"witcert_core", "witcert_core.errors", "witcert_core.serving", "witcert_core.serving.http"}
    past = [
        f"{name} imports {other}"
        for name, path in modules(package).items()
        for other in imported(path, core)
        if other.startswith("witcert_core") and other not in allowed
    ]
    assert not past, "\n".join(past)


def test_the_door_tells_the_type_checker_what_it_finds() -> None:
    shown = {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(DOOR.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("witcert_core")
        for alias in node.names
    }
    assert shown == {(module, name) for module, names in serving._HOMES.items() for name in names}
    assert all(hasattr(serving, name) for _, name in shown)
    assert len({name for _, name in shown}) == len(shown)
    with pytest.raises(AttributeError, match="has no attribute 'Runtimes'"):
        _ = serving.Runtimes
