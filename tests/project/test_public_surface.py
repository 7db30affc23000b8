"""The public surface is one page: what the package's docstring names, documented, and nothing else."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import witcert_core


def test_the_page_names_exactly_what_is_exported() -> None:
    page = inspect.getdoc(witcert_core) or ""
    table = page.split("\n\n")[2]
    named = set(re.findall(r"\w+", " ".join(line[20:] for line in table.splitlines()))) - {
        "decorator",
        "base",
    }
    assert named == set(witcert_core.__all__)


@pytest.mark.parametrize("name", witcert_core.__all__)
def test_every_name_is_documented(name: str) -> None:
    thing = getattr(witcert_core, name)
    assert name == "hookimpl" or len(inspect.getdoc(thing) or "") > 20


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
