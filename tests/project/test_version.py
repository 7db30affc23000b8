"""The version stands in one file, ``VERSION``; whatever else must name it agrees."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomllib
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
VERSION = (ROOT / "VERSION").read_text(encoding="utf-8").strip()
STANDINS = {
    "adapters/vllm/cpu_shim",
    *(f"examples/{kind}_plugin" for kind in ("quantizer", "packed_quantizer", "gate", "observer")),
}
"""Have versions of their own: one stands in for vLLM, the others for distributions of somebody else's."""
PROJECTS = [
    path
    for path in sorted([ROOT / "pyproject.toml", *ROOT.glob("[!.]*/**/pyproject.toml")])
    if str(path.parent.relative_to(ROOT)) not in STANDINS
]


def name_of(path: Path) -> str:
    return str(path.parent.relative_to(ROOT))


def test_the_version_is_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)
    assert len(PROJECTS) >= 11


@pytest.mark.parametrize("path", PROJECTS, ids=name_of)
def test_a_distribution_takes_its_version_from_the_one_file(path: Path) -> None:
    settings = tomllib.loads(path.read_text(encoding="utf-8"))
    assert settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"file": "VERSION"}
    link = path.parent / "VERSION"
    assert link.resolve() == ROOT / "VERSION"


@pytest.mark.parametrize("path", PROJECTS, ids=name_of)
def test_a_distribution_asks_for_this_core(path: Path) -> None:
    """Adapters use what is not public, so they name the core's version exactly; others name the minor version."""
    listed = tomllib.loads(path.read_text(encoding="utf-8"))["project"].get("dependencies", [])
    for asked in (r for r in map(Requirement, listed) if r.name == "witcert"):
        major, minor, _ = map(int, VERSION.split("."))
        exact = path.parent.parent == ROOT / "adapters"
        assert asked.specifier == SpecifierSet(f"=={VERSION}" if exact else f">={major}.{minor},<{major}.{minor + 1}")


def test_the_citation_names_it() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == VERSION


def test_the_changelog_has_a_section_for_it() -> None:
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert VERSION in sections[:2]


def test_no_code_names_it() -> None:
    """The installed distribution knows its version; code asks it."""
    sources = [
        path
        for folder in ("witcert_core", "adapters", "demo", "plugins")
        for path in (ROOT / folder).glob("**/*.py")
        if not {"tests", "build"} & set(path.parts)
    ]
    assert sources
    assert not [str(path) for path in sources if f'"{VERSION}"' in path.read_text(encoding="utf-8")]
