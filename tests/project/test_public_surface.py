"""The public surface is one page: what the package's docstring names, documented, and nothing else."""

from __future__ import annotations

import doctest
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import witcert_core
from witcert_core.policy.gate_registry import GateRegistry
from witcert_core.quantizers import REGISTRY, QuantizerRegistry


def test_the_page_names_exactly_what_is_exported() -> None:
    page = inspect.getdoc(witcert_core) or ""
    table = page.split("\n\n")[2]
    named = set(re.findall(r"\w+", " ".join(line[20:] for line in table.splitlines()))) - {
        "decorator",
        "base",
    }
    assert named == set(witcert_core.__all__)


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies, so that what an example registers is forgotten after it."""
    quantizers, gates = QuantizerRegistry(), GateRegistry()
    for name in REGISTRY.names():
        quantizers.register(REGISTRY.cls(name))
    for module in ("policy.plugins", "quantizers.function"):
        monkeypatch.setattr(f"witcert_core.{module}.REGISTRY", quantizers)
    monkeypatch.setattr("witcert_core.policy.plugins.GATES", gates)


@pytest.mark.parametrize("name", witcert_core.__all__)
@pytest.mark.usefixtures("registries")
def test_every_name_is_documented_with_an_example_that_runs(name: str) -> None:
    thing = getattr(witcert_core, name)
    assert len((inspect.getdoc(thing) or "").partition("Example:")[0]) > 20
    finder = doctest.DocTestFinder(recurse=False, exclude_empty=True)
    examples = finder.find(thing, name, module=False, globs={"__name__": "__main__"})
    assert examples, f"{name} has no example in its docstring"
    if name == "meter":
        pytest.importorskip("transformers", reason="its example meters a model of transformers; run by tests/evaluate")
    said: list[str] = []
    failed, run = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples[0], out=said.append)
    assert run
    assert not failed, "".join(said)


def test_nothing_public_is_missing_from_all() -> None:
    public = {
        name for name, thing in vars(witcert_core).items() if not name.startswith("_") and not inspect.ismodule(thing)
    }
    assert public == set(witcert_core.__all__)


def test_errors_are_one_family() -> None:
    errors = [getattr(witcert_core, name) for name in witcert_core.__all__ if name.endswith("Error")]
    assert len(errors) == 5
    assert all(issubclass(error, witcert_core.WitCertError) for error in errors)


def test_the_code_of_the_page_on_plugins_runs() -> None:
    """In a process of its own: what it registers stays there."""
    page = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, flags=re.S | re.M)
    assert len(blocks) >= 6
    done = subprocess.run([sys.executable, "-c", "\n".join(blocks)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
