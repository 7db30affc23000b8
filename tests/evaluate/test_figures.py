"""What README and docs show is what `make figures` made, and what a small run makes again."""

from __future__ import annotations

import importlib
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench import figures as bench_figures
from bench import shown, tiny
from bench.common.report import markdown
from witcert_core.report import risk

ROOT = Path(__file__).parents[2]

ALWAYS = ("capacity", "engines", "readme")
WORDS = {
    # page -> words -> what of which result they stand for, and how far the words may be from it
    "limits.md": {
        "about 4 % of a small model's speed at stride 32": ("sglang", "int8_token_group, stride 32", 1 - 0.04, 0.02)
    },
}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return shown.read_results()


@pytest.fixture(scope="module")
def blocks(results: dict[str, Any]) -> dict[str, str]:
    return shown.render(results)


def test_the_pages_show_what_the_results_say(blocks: dict[str, str]) -> None:
    assert tuple(blocks) == (*ALWAYS, *(name for name in shown.SECTIONS if (shown.FIGURES / f"{name}.json").exists()))
    assert {"coverage", "drift", "risk", "tiny_ruler"} <= set(blocks)
    assert json.loads((shown.FIGURES / "figures.json").read_text()) == {"blocks": blocks}
    seen: set[str] = set()
    for page in shown.pages():
        for name, text in shown.blocks_of(page.read_text()).items():
            assert text == blocks[name], f"{page.name}: {name}; `python -m bench.figures --render` renews it"
            seen.add(name)
    assert seen == set(blocks)


def test_no_number_is_measured_outside_the_blocks() -> None:
    """Prose around the blocks may name settings, but a figure with a decimal or a percentage comes from a result."""
    text = (ROOT / "docs" / "evaluation.md").read_text()
    for name in shown.blocks_of(text):
        text = re.sub(rf"<!-- figures: {name} -->.*?<!-- end of {name} -->", "", text, flags=re.S)
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)  # commands
    settings = {"95 %", "0.2", "0.5", "0.01"}
    found = set(re.findall(r"\d+(?:\.\d+)? %|(?<![\w.])\d+\.\d+(?![\w.])", text)) - {"2404.06654"}
    assert found <= settings


@pytest.mark.parametrize("engine", shown.ENGINES)
def test_the_engines_pages_show_what_was_measured(engine: str) -> None:
    """`results.md` is `results.json` rendered, to the last character."""
    folder, page = ROOT / "bench" / engine, importlib.import_module(f"bench.{engine}.bench")
    results = json.loads((folder / "results.json").read_text())
    assert (folder / "results.md").read_text() == markdown(results, page.HEAD, page.SHOWN)


def test_words_that_stand_for_a_measured_number_are_near_it(results: dict[str, Any]) -> None:
    for page, claims in WORDS.items():
        text = " ".join((ROOT / "docs" / page).read_text().split())
        for words, (engine, policy, meant, slack) in claims.items():
            assert words in text
            (row,) = [row for row in results[engine]["speed"]["rows"] if row["policy"] == policy]
            assert row["ratio"] == pytest.approx(meant, abs=slack), f"{page}: {words!r} was measured again"


def test_a_changed_number_would_be_noticed(results: dict[str, Any], blocks: dict[str, str]) -> None:
    for name, path in {
        "risk": ("curve", "half"),
        "coverage": ("original", "quantizers", "int8_dither", "at_tau", "0.01", "meter"),
        "drift": ("twin", "quantizers", "kivi", "kl", "value"),
        "tiny_ruler": ("rows", 1, "score", "value"),
        "tiny_layers": ("quantizers", "fp8_e4m3_cast", "rows", 0, "kl", "value"),
        "tiny_trust": ("quantizers", "fp8_e4m3_cast", "verdicts", "harmless"),
        "tiny_coverage": ("twin", "quantizers", "int8_dither", "at_tau", "0.01", "meter"),
        "capacity": ("rows", 0, "tokens"),
        "sglang": ("capacity", "rows", 1, "ratio"),
        "vllm": ("speed", "rows", 2, "ratio"),
    }.items():
        changed = json.loads(json.dumps(results))
        at = changed[name]
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = at[path[-1]] * 2 + 0.3
        block = "engines" if name in shown.ENGINES else name
        assert shown.render(changed)[block] != blocks[block]


def test_the_figures_are_there() -> None:
    linked = {
        link for page in shown.pages() for link in re.findall(r"\]\((?:docs/)?figures/(\w+\.svg)\)", page.read_text())
    }
    drawn = {path.name for path in shown.FIGURES.glob("*.svg")}
    assert linked == drawn
    for name in drawn:
        assert ET.parse(shown.FIGURES / name).getroot().tag.endswith("svg")


def test_a_small_run_gives_the_same_again(results: dict[str, Any], twin_path: Path) -> None:
    models = {"twin": str(twin_path)}
    console = Console(quiet=True)
    capacity = tiny.make_capacity(models, console, twin_path, 1)
    assert capacity == {key: value for key, value in results["capacity"].items() if key != "made_with"}
    known, found = results["smoke"], tiny.make_smoke(models, console, twin_path, 1)
    assert found["cells"] == known["cells"] > 100
    assert found["violations"] == known["violations"]
    for form, share in found["at_tau"].items():
        assert share == pytest.approx(known["at_tau"][form], abs=0.02)
        assert found["over_extremal"][form]["median"] == pytest.approx(known["over_extremal"][form]["median"], rel=1e-3)
    for setting, kl in found["kl"].items():
        assert kl == pytest.approx(known["kl"][setting], rel=1e-3, abs=1e-9)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty work folder, results to `published`, and pages left alone."""
    monkeypatch.setattr(bench_figures, "WORK", tmp_path / "work")
    monkeypatch.setattr(bench_figures, "FIGURES", tmp_path / "published")
    monkeypatch.setattr(bench_figures, "renew_pages", lambda: None)
    return tmp_path / "work"


def test_one_section_is_made_and_published(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_all(names: list[str], _jobs: int, size: int) -> None:
        for name in names:
            bench_figures.make_section(name, size)

    monkeypatch.setattr(bench_figures, "make_all", make_all)
    assert bench_figures.main(["--only", "capacity"]) == 0
    published = work.parent / "published"
    made = json.loads((published / "capacity.json").read_text())
    assert made == json.loads((shown.FIGURES / "capacity.json").read_text())
    assert [path.name for path in published.iterdir()] == ["capacity.json"]
    assert [path.name for path in work.iterdir()] == ["stamp"]


def test_a_run_that_was_stopped_goes_on(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def make_all(names: list[str], _jobs: int, _size: int) -> None:
        """The first section is finished, then Ctrl-C."""
        asked.extend(names)
        for name in names[:1] if len(asked) == len(names) else names:
            (work / name).mkdir()
            (work / name / f"{name.removeprefix(bench_figures.PREFIX)}.svg").write_text("drawn")
            (work / f"{name}.json").write_text("{}")
        if len(asked) == len(names):
            raise KeyboardInterrupt

    monkeypatch.setattr(bench_figures, "make_all", make_all)
    names = list(bench_figures.MAKERS)
    assert bench_figures.main([]) == 130
    assert not (work.parent / "published").exists()  # pages never show a part of a run
    assert bench_figures.main([]) == 0
    assert asked == [*names, *names[1:]]
    assert f"taken over from a run that was stopped: {names[0]}" in capsys.readouterr().out
    assert {path.name for path in (work.parent / "published").iterdir()} == {
        f"{name}.{kind}" for name in names for kind in ("json", "svg")
    }


def test_nothing_is_taken_over_from_other_code(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def finish_one() -> None:
        bench_figures.open_work(fresh=False, size=1)
        (work / "smoke.json").write_text("{}")

    finish_one()
    assert bench_figures.open_work(fresh=False, size=1) == ["smoke"]
    assert bench_figures.open_work(fresh=True, size=1) == []
    finish_one()
    assert bench_figures.open_work(fresh=False, size=2) == []
    finish_one()
    monkeypatch.setattr(bench_figures, "made_with", lambda: {"torch": "another"})
    assert bench_figures.open_work(fresh=False, size=1) == []


def test_a_section_that_fails_is_named_and_the_others_are_ended(
    work: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    bench_figures.open_work(fresh=True, size=1)
    monkeypatch.setattr(bench_figures, "make_section", no_section)
    with pytest.raises(SystemExit, match="failed"):
        bench_figures.make_all(["ruler", "trust", "smoke"], jobs=2, size=1)
    assert "smoke: begun" not in capfd.readouterr().out


def no_section(name: str, _size: int) -> None:
    """In the place of one, in a process of its own."""
    raise RuntimeError(name)


def test_no_bound_was_violated(results: dict[str, Any]) -> None:
    for model in (results[name][twin] for name in ("coverage", "tiny_coverage") for twin in ("original", "twin")):
        for result in model["quantizers"].values():
            assert all(count == 0 for count in result["violations"]["deterministic"].values())
    assert all(result["violations"] == 0 for result in results["tiny_trust"]["quantizers"].values())
    assert all(row["meter"]["violations"] == 0 < row["meter"]["audited"] for row in results["tiny_ruler"]["rows"])
    assert results["risk"]["violations"] == 0


def test_the_score_in_summaries_is_the_one_that_was_measured(results: dict[str, Any]) -> None:
    found = results["risk"]
    assert found["statistic"] == risk.STATISTIC
    assert tuple(float(f"{found['curve'][name]:.3g}") for name in ("half", "power")) == (risk.HALF, risk.POWER)
