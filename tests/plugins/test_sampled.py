"""What sampled requests are told of the truth, in the serving runtime: the full audit's, for a share of its bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plugin_serving import HKV, LAYERS, D, MiniEngine, Served, play, sampled_of, sampling_engine

from witcert_core.report.prometheus import Metrics

TOKEN_BYTES = LAYERS * HKV * 2 * D * 4


def engine(name: str = "int4_token_group", **sections: Any) -> MiniEngine:
    return sampling_engine(name, sections.pop("meter", {"audit_share": 1.0}), **sections)


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("int4_token_group", {}, {}),
    ("int4_token_group", {}, {"prefill_reads": "stored"}),
    ("int8_dither", {}, {}),
    ("kivi", {"residual": 32}, {}),
    ("kvquant", {"calibration_tokens": 16, "bits": 3}, {"prefill_reads": "stored"}),
    ("int4_token_group", {}, {"gate": {"kind": "certified", "tau": 0.05, "block_size": 4}}),
]


@pytest.mark.parametrize(("name", "params", "sections"), CASES, ids=str)
def test_the_truth_of_a_sample_is_the_full_audits(name: str, params: dict[str, Any], sections: dict[str, Any]) -> None:
    full, _ = play(engine(name, params=params, meter={"audit_every": 1}, **sections))
    sampled, summaries = play(engine(name, params=params, **sections))
    compared = 0
    for mine, theirs in zip(sampled, full, strict=True):
        assert mine.layers.keys() == theirs.layers.keys()
        for layer, cells in mine.layers.items():
            audited = theirs.layers[layer].tv_audit
            truth = mine.truths[layer]
            assert truth.rows == list(range(len(mine.rows)))
            assert audited is not None
            torch.testing.assert_close(truth.tv, audited, rtol=1e-6, atol=1e-9)
            assert (truth.tv <= cells.meter).all()
            assert (truth.out <= cells.out_bound).all()
            compared += int((cells.num_quantized > 0).sum())
    assert sum(summary["sample"]["cells"] for summary in summaries) == compared > 0
    for summary in summaries:
        assert summary["sample"]["violations"] == 0
        assert summary["sample"]["rows_not_audited"] == {}
        assert summary["sample"]["tv"]["p50"] <= summary["sample"]["tv"]["p99"] <= summary["sample"]["tv"]["max"]
        assert summary["sample"]["bound_over_tv"]["p50"] >= 1


def test_a_share_of_the_requests_is_compared_and_the_others_say_nothing() -> None:
    made = engine(meter={"audit_share": 0.3, "share_seed": 7})
    found = []
    for number in range(24):
        request = Served(made, number)
        made.step({request: 12})
        made.step({request: 1}).count(made.runtime.ledger, {0})
        found.append(made.runtime.finish(request.name, "stop")["sample"])
    drawn = [sample is not None for sample in found]
    assert 2 <= sum(drawn) <= 14
    again = engine(meter={"audit_share": 0.3, "share_seed": 7})
    assert drawn == [sampled_of(again.runtime).sample.draw() for _ in range(24)]
    assert all(sample["cells"] == 4 * LAYERS for sample in found if sample)


def test_copies_take_the_bytes_of_the_policy_and_what_has_none_is_not_audited() -> None:
    made = engine(meter={"audit_share": 1.0, "share_bytes": 30 * TOKEN_BYTES + 1})
    assert made.runtime.status()["bytes_sample"] == 30 * TOKEN_BYTES
    assert made.runtime.status()["bytes_audit_copies"] == 0
    a, b = Served(made, 1), Served(made, 2)
    made.step({a: 20})
    made.step({b: 20})  # needs room that a holds
    made.step({a: 1, b: 1}).count(made.runtime.ledger, {0, 1})
    reasons = [made.runtime.finish(request.name, "stop")["sample"] for request in (a, b)]
    assert reasons[0]["cells"] == 0
    assert reasons[0]["rows_not_audited"] == {"its exact copies made room for another request's": 1}
    assert reasons[1]["cells"] == 4 * LAYERS
    c = Served(made, 3)
    made.step({c: 40})
    made.step({c: 1}).count(made.runtime.ledger, {0})
    assert made.runtime.finish(c.name, "stop")["sample"]["rows_not_audited"] == {"no room in meter.share_bytes": 1}


def test_a_prefix_is_audited_with_the_copies_of_whoever_computed_it() -> None:
    for share, reason in ((1.0, {}), (0.0, {"its prefix was computed by a request without exact copies": 1})):
        made = engine(prefill_reads="stored")
        a = Served(made, 1)
        sampled_of(made.runtime).sample.share = share
        made.step({a: 20})
        sampled_of(made.runtime).sample.share = 1.0
        b = Served(made, 2, prefix_of=a, shared=16)
        step = made.step({b: 1})
        step.count(made.runtime.ledger, {0})
        sample = made.runtime.finish(b.name, "stop")["sample"]
        assert sample["rows_not_audited"] == reason
        assert (sample["cells"] > 0) == (not reason)
        if not reason:
            assert all((step.truths[layer].tv <= step.layers[layer].meter).all() for layer in range(LAYERS))


def test_metrics_show_the_truth_and_what_is_missing() -> None:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    made = engine(meter={"audit_share": 1.0, "share_bytes": 30 * TOKEN_BYTES})
    made.runtime.ledger._metrics = Metrics(registry)
    _, summaries = play(made)
    cells = sum(summary["sample"]["cells"] for summary in summaries)
    label = {"quantizer": "int4_token_group"}
    assert registry.get_sample_value("witcert_true_tv_count", label) == cells
    assert registry.get_sample_value("witcert_true_output_error_count", label) == cells
    assert registry.get_sample_value("witcert_bound_over_true_tv_bucket", {**label, "le": "1.0"}) == 0
    assert registry.get_sample_value("witcert_audit_violations_total", label) == 0
    missed = sum(sum(summary["sample"]["rows_not_audited"].values()) for summary in summaries)
    shown = [s.value for m in registry.collect() for s in m.samples if s.name == "witcert_rows_not_audited_total"]
    assert sum(shown) == missed > 0
