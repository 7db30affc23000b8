"""What README and docs show is what `make figures` made, and what a small run makes again."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import figures as bench_figures  # noqa: E402
import shown  # noqa: E402

MEASURED = ("capacity", "coverage", "layers", "readme", "ruler", "trust")


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return shown.read_results()


@pytest.fixture(scope="module")
def blocks(results: dict[str, Any]) -> dict[str, str]:
    return shown.render(results)


def test_the_pages_show_what_the_results_say(blocks: dict[str, str]):
    assert tuple(blocks) == MEASURED
    assert json.loads((shown.FIGURES / "figures.json").read_text()) == {"blocks": blocks}
    seen: set[str] = set()
    for page in shown.pages():
        for name, text in shown.blocks_of(page.read_text()).items():
            assert text == blocks[name], f"{page.name}: {name}; `make figures` renews it"
            seen.add(name)
    assert seen == set(blocks)


def test_no_number_is_measured_outside_the_blocks():
    """Prose around the blocks may name settings, but a figure with a decimal or a percentage comes from a result."""
    text = (ROOT / "docs" / "evaluation.md").read_text()
    for name in shown.blocks_of(text):
        text = re.sub(rf"<!-- figures: {name} -->.*?<!-- end of {name} -->", "", text, flags=re.S)
    settings = {"95 %", "0.2", "0.5"}
    found = set(re.findall(r"\d+(?:\.\d+)? %|(?<![\w.])\d+\.\d+(?![\w.])", text)) - {"2404.06654"}
    assert found <= settings


def test_a_changed_number_would_be_noticed(results: dict[str, Any], blocks: dict[str, str]):
    for name, path in {
        "ruler": ("rows", 1, "score", "value"),
        "layers": ("quantizers", "fp8_e4m3_cast", "rows", 0, "kl", "value"),
        "trust": ("quantizers", "fp8_e4m3_cast", "verdicts", "harmless"),
        "coverage": ("twin", "quantizers", "int8_dither", "at_tau", "0.01", "meter"),
        "capacity": ("rows", 0, "tokens"),
    }.items():
        changed = json.loads(json.dumps(results))
        at = changed[name]
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = at[path[-1]] * 2 + 0.3
        assert shown.render(changed)[name] != blocks[name]


def test_the_figures_are_there():
    linked = {
        link
        for page in shown.pages()
        for link in re.findall(r"\]\((?:docs/)?figures/(\w+\.svg)\)", page.read_text())
    }
    drawn = {path.name for path in shown.FIGURES.glob("*.svg")}
    assert linked == drawn
    for name in drawn:
        assert ET.parse(shown.FIGURES / name).getroot().tag.endswith("svg")


def test_a_small_run_gives_the_same_again(results: dict[str, Any], twin_path: Path):
    models = {"twin": str(twin_path)}
    console = Console(quiet=True)
    capacity = bench_figures.make_capacity(models, console)
    assert capacity == {key: value for key, value in results["capacity"].items() if key != "made_with"}
    known, found = results["smoke"], bench_figures.make_smoke(models, console)
    assert found["cells"] == known["cells"] > 100
    assert found["violations"] == known["violations"]
    for form, share in found["at_tau"].items():
        assert share == pytest.approx(known["at_tau"][form], abs=0.02)
        assert found["over_extremal"][form]["median"] == pytest.approx(known["over_extremal"][form]["median"], rel=1e-3)
    for setting, kl in found["kl"].items():
        assert kl == pytest.approx(known["kl"][setting], rel=1e-3, abs=1e-9)


def test_no_bound_was_violated(results: dict[str, Any]):
    for model in ("original", "twin"):
        for result in results["coverage"][model]["quantizers"].values():
            assert all(count == 0 for count in result["violations"]["witness"].values())
    assert all(result["violations"] == 0 for result in results["trust"]["quantizers"].values())
    assert all(row["meter"]["violations"] == 0 < row["meter"]["audited"] for row in results["ruler"]["rows"])
