"""Bounds from sketches of a sample of requests, in the serving runtime: those of sketches for everybody, for fewer bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from serving import LAYERS, MiniEngine, Served, attention

from witcert_core.quantizers.dither import DitherKey
from witcert_core.report.prometheus import Metrics
from witcert_core.report.text import render_sentence
from witcert_core.serving.sketched import EVICTED, NO_ROOM, PREFIX, SAME_PASS

METER = {"stride": 1, "max_rows": 4}


def engine(name: str = "int4_token_group", meter: dict[str, Any] | None = None, **sections: Any) -> MiniEngine:
    made = MiniEngine(name, sections.pop("params", {}), meter={**METER, **(meter or {"sketch_share": 1.0})}, **sections)
    made.runtime.encoder.dither_key = DitherKey(0, 5, 0)  # two engines draw alike
    return made


def play(made: MiniEngine) -> tuple[list[Any], list[dict[str, Any]]]:
    """Two requests, chunks and generated tokens; every step, and the summaries."""
    a, b = Served(made, 1), Served(made, 2)
    steps = []
    for new in ({a: 37, b: 20}, {a: 3, b: 1}, {a: 1, b: 30}, {a: 1, b: 1}):
        step = made.step(new)
        step.count(made.runtime.ledger, {0, 1})
        steps.append(step)
    return steps, [made.runtime.finish(request.name, "stop") for request in (a, b)]


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("int4_token_group", {}, {}),
    ("int4_token_group", {}, {"prefill_reads": "stored", "dtype": torch.bfloat16}),
    ("int8_dither", {}, {}),
    ("kivi", {"residual": 32}, {}),
    ("kivi", {"residual": 32}, {"prefill_reads": "stored"}),
    ("kvquant", {"calibration_tokens": 16, "bits": 3}, {"prefill_reads": "stored"}),
]


@pytest.mark.parametrize(("name", "params", "sections"), CASES, ids=str)
def test_the_bounds_of_a_sample_are_those_of_sketches_for_everybody(
    name: str, params: dict[str, Any], sections: dict[str, Any]
) -> None:
    everybody, _ = play(engine(name, {"sketch_bits": 8}, params=params, **sections))
    mine, summaries = play(engine(name, {"sketch_share": 1.0, "audit_share": 1.0}, params=params, **sections))
    cells = 0
    for sketched, theirs in zip(mine, everybody, strict=True):
        assert sketched.sketched.keys() == theirs.layers.keys()
        for layer, found in sketched.sketched.items():
            assert found.rows == list(range(len(sketched.rows)))
            torch.testing.assert_close(found.tv, theirs.layers[layer].meter, rtol=1e-6, atol=1e-9)
            assert (sketched.truths[layer].tv <= found.tv).all()
            cells += int((sketched.layers[layer].num_quantized > 0).sum())
    assert sum(summary["sample"]["sketched"]["cells"] for summary in summaries) == cells > 0
    for summary in summaries:
        sample = summary["sample"]
        assert sample["violations"] == 0
        assert sample["sketched"]["rows_not_sketched"] == {}
        assert sample["sketched"]["share_of_bound"]["p50"] < 0.9
        assert 1 <= sample["sketched"]["bound_over_tv"]["p50"] < sample["bound_over_tv"]["p50"]
