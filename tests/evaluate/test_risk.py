"""Which statistic ranks drift: made-up requests with a known answer, and a run of the small model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from witcert_demo.tasks import make_samples

from witcert_core.cli import main
from witcert_core.evaluate import risk
from witcert_core.evaluate.forcing import forced_samples
from witcert_core.evaluate.offline.model import LoadedModel
from witcert_core.evaluate.settings import parse_quantizer
from witcert_core.evaluate.statistics import LARGEST, by_depth, statistics_of
from witcert_core.evaluate.task_registry import choose_source
from witcert_core.report.risk import STATISTIC, estimate

OPTIONS = {"resamples": 200, "seed": 0}


def row(request: int, quantizer: str, kl: float, **statistics: float) -> dict[str, Any]:
    return {
        "request": request,
        "quantizer": quantizer,
        "needle": request % 3 == 0,
        "kl": kl,
        "changed": kl > 0.5,
        "violations": 0,
        "statistics": {STATISTIC: kl, **statistics},
    }


def test_the_statistic_that_ranks_drift_is_chosen_and_the_truth_is_not() -> None:
    generator = torch.Generator().manual_seed(2)
    noise = torch.rand(64, generator=generator).tolist()
    drifts = torch.rand(64, generator=generator).tolist()
    rows = [
        row(i // 2, "ab"[i % 2], kl, **{STATISTIC: x, "bound_mean": kl**2 + 0.01, "tv_mean": kl})
        for i, (kl, x) in enumerate(zip(drifts, noise, strict=True))
    ]
    found = risk.analyse(rows, OPTIONS)
    assert found["best"] == "bound_mean"
    assert found["candidates"]["bound_mean"]["reported"]["across"] == pytest.approx(1.0)
    assert "tv_mean" not in found["candidates"]
    assert found["across_truth"]["kl"]["value"] == pytest.approx(1.0)
    assert abs(found["across"]["kl"]["value"]) < 0.6  # of what summaries have, which here is noise
    assert found["across"]["kl"]["low"] < 0 < found["across"]["kl"]["high"]
    assert found["across"]["requests"] == 32
    assert set(found["quantizers"]) == {"a", "b"}
    assert found["no_better_than_chance"] == ["a", "b"]


def test_no_request_is_chosen_on_and_reported() -> None:
    first, second = risk.split([row(i // 3, "abc"[i % 3], 0.1 * i) for i in range(30)])
    assert not {r["request"] for r in first} & {r["request"] for r in second}
    assert len(first) == len(second) == 15


def test_the_curve_is_the_likeliest() -> None:
    """Of many draws from a known curve it finds that curve."""
    generator = torch.Generator().manual_seed(4)
    x = torch.exp(3 * torch.randn(20_000, generator=generator, dtype=torch.float64))
    p = x**0.7 / (x**0.7 + 2.0**0.7)
    changed = (torch.rand(len(x), generator=generator) < p).tolist()
    curve = risk.fit_curve(x.tolist(), changed)
    assert curve is not None
    assert curve["half"] == pytest.approx(2.0, rel=0.1)
    assert curve["power"] == pytest.approx(0.7, rel=0.05)
    assert risk.fit_curve(x.tolist(), [not c for c in changed]) is None


def test_statistics_of_cells() -> None:
    layer = torch.tensor([0.0, 0.0, 1.0, 2.0])
    columns = {
        "bound": torch.tensor([0.1, 0.3, 1.0, 0.15]),
        "log_a": torch.tensor([0.0, 2.0, math.inf, 3.0]),
        "out_bound": torch.tensor([0.0, 1.0, 1.0, math.nan]),
        "floor": torch.tensor([0.0, 0.25, 0.0, 0.0]),
        "tv": torch.tensor([math.nan, 0.1, 0.2, math.nan]),
    }
    found = statistics_of(layer, columns)
    assert found["uncertified_share"] == 0.5
    assert found["log_a_mean"] == pytest.approx((5 + LARGEST) / 4)
    assert found["log_a_max"] == LARGEST
    assert found["bound_q90"] == pytest.approx(float(columns["bound"].double().quantile(0.9)))
    assert (found["floor_max"], found["damaged_share"]) == (0.25, 0.25)
    assert found["tv_mean"] == pytest.approx(0.15)
    assert (found["log_a_first_third"], found["log_a_last_third"]) == (1.0, 3.0)
    assert by_depth(layer, torch.tensor([0.0, 2.0, 4.0, 3.0]))["worst_layer"] == 4.0
    assert statistics_of(layer[:0], {name: x[:0] for name, x in columns.items()}) == {}


def test_what_is_observed_is_what_the_summary_says(twin: LoadedModel) -> None:
    """The statistic of the score out of every cell, and out of the sums that a ledger keeps."""
    source = choose_source("auto", twin.tokenizer)
    needles = forced_samples(twin, source, ("multi_key",), (128,), 3, 0)
    specs = [parse_quantizer(name) for name in ("fp8_e4m3_cast", "kivi:bits=2,residual=32")]
    requests = risk.requests_of(twin, specs[0], [], needles)
    assert all(request.needle for request in requests)
    rows = risk.measure(twin, specs, requests)
    assert len(rows) == 2 * len(requests)
    for found in rows:
        assert found["violations"] == 0
        assert found["risk"] == pytest.approx(estimate(found["statistics"][STATISTIC]), rel=1e-9)
    assert any(found["changed"] for found in rows)


def test_the_command_writes_what_it_found(twin_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text(" ".join(sample.prompt for sample in make_samples("multi_query", 256, 8, seed=5)))
    options = ["--model", str(twin_path), "--quantizers", "fp8_e4m3_cast,int4_token_group", "--out", str(tmp_path)]
    options += ["--text", str(text), "--samples", "12", "--context", "64", "--tokens", "8"]
    assert main(["eval", "risk", *options, "--tasks", "multi_key", "--lengths", "96", "--needles", "8"]) == 0
    found = json.loads((tmp_path / "risk.json").read_text())
    assert found["schema"] == risk.SCHEMA
    assert found["violations"] == 0
    assert found["statistic"] == STATISTIC
    assert found["about"]["prose"] + found["about"]["needles"] > 12
    assert {"fp8_e4m3_cast", "int4_token_group"} == set(found["quantizers"])
    assert (tmp_path / "risk.md").read_text().startswith("| KV cache | requests |")
