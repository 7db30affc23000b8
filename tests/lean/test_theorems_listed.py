"""Pages name theorems only from ``lean/theorems.txt``, and the proofs' own page names them all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEAN = ROOT / "lean"
LISTED = [n for line in (LEAN / "theorems.txt").read_text().splitlines() if (n := line.split("#")[0].strip())]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")), LEAN / "README.md"]
SOURCES = {path.relative_to(LEAN): path.read_text() for path in sorted(LEAN.glob("WitCert/**/*.lean"))}
NAME = re.compile(r"WitCert\.(?!lean\b)[A-Za-z_][\w.']*[\w']")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_names_only_listed_theorems(page: Path) -> None:
    named = set(NAME.findall(page.read_text(encoding="utf-8")))
    assert named <= set(LISTED), f"{page.name} names {sorted(named - set(LISTED))}; list them in lean/theorems.txt"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_uses_no_short_name_of_another_theorem(page: Path) -> None:
    declared = {n for text in SOURCES.values() for n in re.findall(r"^theorem ([\w.']+)", text, re.M)}
    ends = {name.rsplit(".", 1)[-1] for name in LISTED}
    unlisted = {n for n in declared if n.rsplit(".", 1)[-1] not in ends and "_" in n}
    spoken = set(re.findall(r"`([\w.']+)`", page.read_text(encoding="utf-8")))
    assert not spoken & unlisted, (
        f"{page.name} names {sorted(spoken & unlisted)}, which lean/theorems.txt does not list"
    )


def test_the_proofs_page_has_a_row_for_every_theorem() -> None:
    rows = re.findall(r"^\| `(WitCert\.[\w.']+)` \|", (LEAN / "README.md").read_text(encoding="utf-8"), re.M)
    assert rows == LISTED


def test_the_proofs_page_names_tests_that_exist() -> None:
    named = set(re.findall(r"`(\w+/test_\w+\.py)`", (LEAN / "README.md").read_text(encoding="utf-8")))
    assert named
    assert all((ROOT / "tests" / name).is_file() for name in named)


def test_every_file_is_part_of_the_library() -> None:
    imported = re.findall(r"^import ([\w.]+)$", (LEAN / "WitCert.lean").read_text(), re.M)
    assert sorted(imported) == sorted(".".join(path.with_suffix("").parts) for path in SOURCES)


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_no_proof_is_left_open(path: Path) -> None:
    code = re.sub(r"/-.*?-/", "", SOURCES[path], flags=re.S)
    found = re.findall(r"\b(?:sorry|admit|axiom|unsafe|native_decide|implemented_by|extern|opaque)\b", code)
    assert not found, f"{path} says {found}"
