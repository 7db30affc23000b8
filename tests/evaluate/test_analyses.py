"""Coverage, calibration and the sweep of layers: against the ledger of the same run, and on made-up cells."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from witcert_demo.task_source import NEEDLES

from witcert_core.cli import main
from witcert_core.evaluate import coverage, sweep, trust
from witcert_core.evaluate.cells import FORMS, JOINT, METER, TAU, WITNESS, CellTable, FormProbe
from witcert_core.evaluate.forcing import (
    Forced,
    ForcedSample,
    collect,
    deltas_of,
    force,
    forced_samples,
    hasty_policy,
    measuring_policy,
    room,
)
from witcert_core.evaluate.offline.engine import OfflineEngine
from witcert_core.evaluate.offline.model import LoadedModel
from witcert_core.evaluate.plots import plot_lines
from witcert_core.evaluate.settings import parse_quantizer

TASKS = ("multi_key", "multi_query")
OPTIONS = {"resamples": 200, "seed": 0}


def samples_of(loaded: LoadedModel, count: int = 1) -> list[ForcedSample]:
    return forced_samples(loaded, NEEDLES, TASKS, [128], count, 3)


@pytest.mark.parametrize("name", ["int8_dither", "int4_token_group", "int4_token_group@4"])
def test_the_cells_are_those_of_the_ledger(original: LoadedModel, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a ledger in plain torch, as a probe measures: kernels for the CPU add what their float32 sums may be off."""
    monkeypatch.setattr("witcert_core.serving.build.without_kernels", lambda *_: "this test")
    spec, samples = parse_quantizer(name), samples_of(original)
    size = room(samples)
    probe = FormProbe(original.shape, (0.01, WITNESS) if name == "int8_dither" else (WITNESS,))
    engine = OfflineEngine(original, measuring_policy(spec), size, probe)
    summaries = [engine.force(f"r{i}", s.prompt, s.answer)[1] for i, s in enumerate(samples)]
    table = probe.table()
    delta = probe.deltas[0]
    assert len(table) == sum(s["cells_measured"] for s in summaries) == sum(s["audit"]["cells"] for s in summaries)
    assert float(table.bounds[delta][METER].max()) == pytest.approx(max(s["worst"]["meter"] for s in summaries))
    certified = int((table.bounds[delta][METER] <= 0.2).sum())
    assert certified == sum(s["tv_certified_cells"] for s in summaries)
    assert float(table.tv.max()) == pytest.approx(max(s["audit"]["tv_max"] for s in summaries))
    assert int((table.floor > 0.2).sum()) == sum(s["damaged_cells"] for s in summaries)
    assert float(table.floor.max()) == pytest.approx(max(s["floor_max"] for s in summaries))
    assert float(table.log_a.max()) == pytest.approx(max(s["log_a_max"] for s in summaries))
    if name == "int8_dither":
        assert int((table.bounds[WITNESS][METER] <= 0.2).sum()) == sum(
            s["deterministic_beside"]["tv_certified_cells"] for s in summaries
        )


def test_failure_probabilities_are_for_bounds_that_come_from_a_law() -> None:
    names = ("int8_dither", "int8_dither_w", "int8_dither@4", "int4_token_group")
    assert [len(deltas_of(parse_quantizer(name), (0.1, 0.01))) for name in names] == [3, 3, 1, 1]


@pytest.fixture(scope="module")
def collected(original: LoadedModel) -> tuple[CellTable, list[Forced]]:
    return collect(original, parse_quantizer("int8_dither_w"), samples_of(original), (1e-1, 1e-6))


def test_no_form_is_below_the_truth_and_the_meter_is_its_smallest(collected: tuple[CellTable, list[Forced]]) -> None:
    table, outcomes = collected
    for delta, bounds in table.bounds.items():
        assert set(bounds) == set(FORMS)
        smallest = torch.stack([bounds[f] for f in ("tanh", "jensen", "needle")]).amin(0).clamp(max=1.0)
        assert torch.equal(bounds[METER], smallest)
        if delta == WITNESS:
            assert all(bool((table.tv <= bound).all()) for bound in bounds.values())
    assert bool((table.bounds[1e-6][METER] >= table.bounds[1e-1][METER]).all())
    # Without a union over tokens: nothing to say without a law; under it no failure, and most cells tighter.
    assert bool((table.bounds[WITNESS][JOINT] == 1).all())
    assert bool((table.tv <= table.bounds[1e-6][JOINT]).all())
    assert float((table.bounds[1e-6][JOINT] < table.bounds[1e-6][METER]).double().mean()) > 0.5
    assert bool((table.bounds[WITNESS][METER] < table.bounds[WITNESS]["eform"]).any())
    assert all(outcome.right and 0 < outcome.nll < 0.5 for outcome in outcomes)


def test_coverage_adds_up(collected: tuple[CellTable, list[Forced]]) -> None:
    table, _ = collected
    found = coverage.coverage_of(table, 4, 4)
    json.dumps(found, allow_nan=False)
    at = coverage.TAUS.index(TAU)
    assert at < 45
    for tier, forms in found["by_tau"].items():
        for form, shares in forms.items():
            assert shares == sorted(shares)
            assert shares[at] == found["at_tau"][tier][form]
            grid = torch.tensor(found["by_layer_head"][tier][form])
            assert grid.shape == (4, 4)
            assert float(grid.mean()) == pytest.approx(shares[at])  # every layer and head has as many cells
    assert found["at_tau"]["1e-06"][METER] <= found["at_tau"]["0.1"][METER]
    assert found["over_extremal"]["deterministic"]["extremal"] == {"median": 1.0, "q95": 1.0}
    assert found["over_extremal"]["deterministic"]["eform"]["median"] > 1.0
    assert all(count == 0 for count in found["violations"]["deterministic"].values())


def made_up(
    tv: list[float], meter: list[float], log_a: list[float], sample: list[int], quantized: list[int] | None = None
) -> CellTable:
    bound = torch.tensor(meter, dtype=torch.float64)
    zeros = torch.zeros(len(tv), dtype=torch.int64)
    return CellTable(
        deltas=(WITNESS,),
        sample=torch.tensor(sample),
        layer=zeros,
        head=zeros,
        num_quantized=torch.tensor(quantized or [3] * len(tv)),
        tv=torch.tensor(tv, dtype=torch.float64),
        log_a=torch.tensor(log_a, dtype=torch.float64),
        floor=torch.tensor([0.0, 0.0, 0.0, 0.3, 0.1, 0.0], dtype=torch.float64),
        bounds={WITNESS: dict.fromkeys(FORMS, bound)},
    )


def outcome(right: bool, nll: float = 0.1) -> Forced:
    return Forced(nll, right, torch.log_softmax(torch.tensor([[0.0, 1.0 if right else -1.0]]).double(), -1))


def test_trust_of_made_up_cells() -> None:
    table = made_up(
        tv=[0.0, 0.02, 0.04, 0.5, 0.3, 0.1],
        meter=[0.1, 0.2, 0.12, 1.0, 0.9, 0.05],
        log_a=[0.0, 1.0, float("inf"), 2.0, 3.0, 0.5],
        sample=[0, 0, 1, 1, 2, 3],
    )
    exact = [outcome(True)] * 3 + [outcome(False)]
    found = trust.trust_of(table, [outcome(True), outcome(False), outcome(False), outcome(False)], exact, OPTIONS)
    json.dumps(found, allow_nan=False)
    assert found["violations"] == 1
    assert found["lost"] == 2  # what the exact cache answers wrongly is not lost
    assert found["verdicts"] == {
        "tau": 0.2,
        "harmless": 4,
        "harmless_certified": 4,
        "damaged": 2,
        "damaged_certified": 0,
        "damaged_proved": 1,
    }
    assert found["ranking"]["log_a_max"]["value"] == 1.0
    assert trust.ranking_scores(table, 4)["uncertified_share"] == [0.0, 0.5, 1.0, 0.0]
    assert trust.ranking_scores(table, 4)["damaged_share"] == [0.0, 0.5, 0.0, 0.0]
    (row,) = [row for row in found["looseness"] if row["tv_above"] == 0.01]
    assert row["cells"] == 2
    assert row["ratio"][1] == pytest.approx((0.2 / 0.02 + 0.12 / 0.04) / 2)
    assert sum(row["cells"] for row in found["looseness"]) == 6
    every = trust.pooled([(table, [outcome(True)] * 4), (table, [outcome(False)] * 4)], exact, OPTIONS)
    assert (every["samples"], every["lost"]) == (8, 3)
    assert every["ranking"]["log_a_max"]["value"] == pytest.approx((2.5 + 4.5 + 3.5) / 15)
    rows = trust.trust_rows({"quantizers": {"q": found}, "pooled": every})
    assert [len(row) for row in rows] == [len(trust.TRUST_COLUMNS)] * 2


def test_shares_are_of_cells_that_read_something_quantized_and_violations_of_all() -> None:
    given: dict[str, Any] = {
        "tv": [0.0, 0.02, 0.04, 0.5, 0.3, 0.1],
        "meter": [0.1, 0.2, 0.12, 1.0, 0.9, 0.05],
        "log_a": [9.0, 1.0, 0.1, 2.0, 3.0, 9.0],
        "sample": [0, 0, 1, 1, 2, 3],
    }
    some, none = made_up(**given, quantized=[0, 1, 0, 4, 2, 0]), made_up(**given, quantized=[0] * 6)
    found = coverage.coverage_of(some, 1, 1)
    assert (found["cells"], found["cells_exact"], found["violations"]["deterministic"][METER]) == (3, 3, 1)
    assert found["at_tau"]["deterministic"][METER] == pytest.approx(1 / 3)
    nothing = coverage.coverage_of(none, 1, 1)
    json.dumps(nothing, allow_nan=False)
    assert (nothing["cells"], nothing["cells_exact"], nothing["tv_max"]) == (0, 6, 0.5)
    assert nothing["at_tau"]["deterministic"] == dict.fromkeys(FORMS)
    assert nothing["by_layer_head"]["deterministic"][METER] == [[None]]
    rows = coverage.coverage_rows({"some": found, "none": nothing})
    assert [row[2] for row in rows] == ["33.3 %", "–"]
    exact, outcomes = [outcome(True)] * 4, [outcome(True)] * 4
    trusted = trust.trust_of(some, outcomes, exact, OPTIONS)
    assert (trusted["cells"], trusted["cells_exact"], trusted["violations"]) == (3, 3, 1)
    assert (trusted["verdicts"]["harmless"], trusted["verdicts"]["harmless_certified"]) == (1, 1)
    assert len(trusted["points"]["tv"]) == 3
    json.dumps(trust.trust_of(none, outcomes, exact, OPTIONS), allow_nan=False)


def test_figures_leave_out_what_has_no_share(tmp_path: Path) -> None:
    table = made_up([0.1] * 6, [0.2] * 6, [0.0] * 6, [0] * 6, quantized=[0] * 6)
    results = {"q": coverage.coverage_of(table, 1, 1)}
    coverage.plot_coverage(results, tmp_path / "coverage.svg")
    coverage.plot_heads(results, tmp_path / "heads.svg")
    assert (tmp_path / "coverage.svg").stat().st_size
    assert (tmp_path / "heads.svg").stat().st_size


def test_layers_are_contaminated_one_by_one_and_together(twin: LoadedModel) -> None:
    assert [s.name for s in sweep.settings(4)] == [
        "layer 0 only",
        "layer 1 only",
        "layer 2 only",
        "layer 3 only",
        "all",
        "layers 0-1",
        "layers 0-2",
        "layers 2-3",
        "layers 1-3",
    ]
    samples = samples_of(twin)
    found = sweep.sweep(twin, parse_quantizer("fp8_e4m3_cast"), samples, OPTIONS)
    rows = {row["setting"]: row for row in found["rows"]}
    assert found["exact_right"] == len(samples) == 2
    assert rows["all"]["lost"]["value"] == 1.0
    assert rows["all"]["nll_increase"]["value"] > 1.0
    alone = [rows[f"layer {i} only"]["kl"]["value"] for i in range(4)]
    assert all(kl > 0 for kl in alone)
    together = rows["all"]["kl"]["value"]
    assert found["cancellation"]["kl"] == {"sum_of_single": pytest.approx(sum(alone)), "all": together}
    assert len(sweep.sweep_rows(found)) == 9


def test_an_untouched_layer_changes_nothing(twin: LoadedModel) -> None:
    (sample, *_), spec = samples_of(twin), parse_quantizer("int4_token_group")
    size = len(sample.prompt) + len(sample.answer)
    exact, part, whole = (
        force(OfflineEngine(twin, hasty_policy(spec, layers), size), sample, "r") for layers in ((), (3,), None)
    )
    assert sweep.divergence(exact, exact) == 0.0
    assert 0 < sweep.divergence(exact, part) < sweep.divergence(exact, whole)


@pytest.fixture(scope="module")
def written(twin_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("analyses")
    options = ["--model", str(twin_path), "--quantizers", "int8_dither", "--lengths", "64", "--samples", "1"]
    options += ["--tasks", "multi_key", "--out", str(out)]
    for command in (["eval", "coverage", "--deltas", "0.01,0.001"], ["eval", "trust"], ["eval", "layers"]):
        assert main([*command, *options]) == 0
    return out


def test_the_commands_write_json_tables_and_figures(written: Path) -> None:
    for name, schema in (("coverage", coverage.SCHEMA), ("trust", trust.SCHEMA), ("layers", sweep.SCHEMA)):
        found = json.loads((written / f"{name}.json").read_text())
        assert found["schema"] == schema
        assert found["about"]["tasks"] == ["multi_key"]
        assert list(found["quantizers"]) == ["int8_dither"]
        assert (written / f"{name}.md").read_text().startswith("| KV cache | ")
    for name in ("coverage", "coverage_delta", "coverage_heads", "trust", "layers"):
        assert ET.parse(written / f"{name}.svg").getroot().tag.endswith("svg")


def test_a_figure_has_the_same_bytes_every_time(tmp_path: Path) -> None:
    panels = [("title", {"eform": ([0.0, 1.0], [0.0, 2.0]), METER: ([0.0, 1.0], [1.0, 2.0])})]
    for name in ("a.svg", "b.svg"):
        plot_lines(tmp_path / name, panels, x_label="x", y_label="y")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize("text", ["0", "1", "x", "nan"])
def test_a_delta_is_a_probability(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", "coverage", "--model", "x", "--quantizers", "none", "--out", str(tmp_path), "--deltas", text]
    assert main(command) == 2
    assert "no probability" in capsys.readouterr().err
