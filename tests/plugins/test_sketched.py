"""Bounds from sketches of a sample of requests in the runtime: what sketches for everybody say, in fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_pool import attention
from plugin_serving import LAYERS, MiniEngine, Served, play, sampling_engine, sketched_of

from witcert_core.report.prometheus import Metrics
from witcert_core.report.text import render_sentence
from witcert_core.serving.banner import banner_text
from witcert_core.serving.passes import RequestPass
from witcert_core.serving.sketched import EVICTED, NO_ROOM, PREFIX, SAME_PASS


def engine(name: str = "int4_token_group", meter: dict[str, Any] | None = None, **sections: Any) -> MiniEngine:
    return sampling_engine(name, meter or {"sketch_share": 1.0}, **sections)


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


def token_bytes(made: MiniEngine) -> int:
    status = made.runtime.status()
    assert status["bytes_sketches"] % status["sketch_tokens"] == 0
    return int(status["bytes_sketches"] // status["sketch_tokens"])


def bounds_hold(made: MiniEngine, step: Any, request: Served) -> None:
    """The last pass computed nothing but one generated token of `request`."""
    for layer, found in step.sketched.items():
        q = made.asked[layer][0]
        weights = attention(q, *made.stored(request, layer))[1]
        exact = attention(q, *(request.exact[kind][layer, : request.length] for kind in "kv"))[1]
        assert ((weights - exact).abs().sum(-1) / 2 <= found.tv[0]).all()
        assert (found.tv[0] < step.layers[layer].meter[0]).all()


def generate(made: MiniEngine, request: Served) -> tuple[dict[str, int], Any]:
    """One token; the sample's rows without sketches, by reason, and the step."""
    step = made.step({request: 1})
    bounds_hold(made, step, request)
    return {reason: count for (_, reason), count in step.not_sketched.items()}, step


def test_sketches_take_the_bytes_of_the_policy_and_the_oldest_go_first() -> None:
    size = token_bytes(engine())
    assert size < 0.7 * LAYERS * 2 * 2 * 64 * 2  # exact copies in 16 bit, of two heads
    made = engine(meter={"sketch_share": 1.0, "share_bytes": 50 * size + 1})
    assert made.runtime.status()["bytes_sketches"] == 50 * size
    a, b = Served(made, 1), Served(made, 2)
    made.step({a: 30})
    assert generate(made, a)[0] == {}
    made.step({b: 30})  # needs room that a holds
    assert generate(made, b)[0] == {}
    missed, step = generate(made, a)
    assert missed == {EVICTED: 1}
    assert step.sketched == {}
    assert made.runtime.status()["bytes_sketches"] == 50 * size == sketched_of(made.runtime).nbytes
    c = Served(made, 3)
    made.step({c: 60})
    assert generate(made, c)[0] == {NO_ROOM: 1}


def test_a_slot_that_is_written_again_has_no_sketch_of_what_it_held() -> None:
    made = engine()
    a = Served(made, 1)
    made.step({a: 30})
    assert generate(made, a)[0] == {}
    sketched_of(made.runtime).sample.share = 0.0
    other = Served(made, 2)
    other.slots[:5] = a.slots[10:15]
    made.step({other: 5})  # not of the sample, in slots that a had
    assert made.step({a: 1}).not_sketched == {(0, EVICTED): 1}
    for change in ("moved", "overwritten"):
        sketched_of(made.runtime).sample.share = 1.0
        b = Served(made, 3 if change == "moved" else 4)
        made.step({b: 30})
        assert generate(made, b)[0] == {}
        if change == "moved":
            made.runtime.moved(b.slots[3:5], b.slots[6:8])
        else:
            made.runtime.overwritten(b.slots[3:5])
        assert made.step({b: 1}).not_sketched == {(0, EVICTED): 1}


def test_requests_in_slots_that_others_left_are_bounded_by_their_own_sketches() -> None:
    made = engine()
    for seed in range(1, 6):  # 200 slots each, of 400
        request = Served(made, seed)
        made.step({request: 120})
        assert generate(made, request)[0] == {}
        made.runtime.finish(request.name, "stop")


def test_a_prefix_is_bounded_with_the_sketches_of_whoever_computed_it() -> None:
    for share, reason in ((1.0, {}), (0.0, {PREFIX: 1})):
        made = engine(prefill_reads="stored")
        a = Served(made, 1)
        sketched_of(made.runtime).sample.share = share
        made.step({a: 20})
        sketched_of(made.runtime).sample.share = 1.0
        b = Served(made, 2, prefix_of=a, shared=16)
        missed, step = generate(made, b)
        assert missed == reason
        assert bool(step.sketched) == (not reason)


def test_a_prefix_of_the_same_pass_is_left_out_for_that_pass_only() -> None:
    made = engine(prefill_reads="stored")
    a, b = Served(made, 1), Served(made, 2)
    b.slots[:16], b.length = a.slots[:16], 16
    for kind in "kv":
        b.exact[kind][:, :16] = a.exact[kind][:, :16]
    step = made.step({a: 20, b: 2})
    assert {reason for (request, reason) in step.not_sketched if request == 1} == {SAME_PASS}
    assert all(step.rows[number].request == 0 for found in step.sketched.values() for number in found.rows)
    assert generate(made, b)[0] == {}


def test_a_pass_that_failed_leaves_unknown_what_it_did_not_sketch() -> None:
    made = engine()
    a = Served(made, 1)
    made.step({a: 20})
    runtime, find = made.runtime, sketched_of(made.runtime).index.find

    sketched_of(runtime).index._used.fill_(-1)  # the next request takes the same copies
    old = find(a.slots[:20])
    b = Served(made, 2)
    runtime.begin([RequestPass(b.name, b.slots[:20], 20)], b.slots[:20])
    runtime.abandon()
    assert find(b.slots[:20]).sort().values.tolist() == old.sort().values.tolist()
    q = torch.randn(4, 64).double()
    for layer in range(LAYERS):
        assert sketched_of(runtime).store[layer].key_radius(q, find(b.slots[:20]), 1.0, 0.0).isinf().all()


def test_a_share_of_the_requests_is_sketched_whoever_is_audited() -> None:
    made = engine(meter={"sketch_share": 0.5, "audit_share": 0.5, "share_seed": 7})
    found = []
    for number in range(24):
        request = Served(made, number)
        made.step({request: 12})
        made.step({request: 1}).count(made.runtime.ledger, {0})
        sample = made.runtime.finish(request.name, "stop")["sample"] or {"sketched": None, "cells": 0}
        assert sample["sketched"] is None or sample["sketched"]["cells"] == 4 * LAYERS
        assert sample["sketched"] is None or (sample["sketched"]["bound_over_tv"] is not None) == (sample["cells"] > 0)
        found.append((sample["sketched"] is not None, sample["cells"] > 0))
    assert len(set(found)) == 4
    again = engine(meter={"sketch_share": 0.5, "share_seed": 7})
    assert [sketched for sketched, _ in found] == [sketched_of(again.runtime).sample.draw() for _ in range(24)]


def test_metrics_text_and_banner_show_the_bounds_and_what_is_missing() -> None:
    from prometheus_client import CollectorRegistry

    size = token_bytes(engine())
    registry = CollectorRegistry()
    made = engine(meter={"sketch_share": 1.0, "audit_share": 1.0, "share_bytes": 45 * size})
    assert f"45 tokens at a time ({45 * size / 1024:.1f} KiB of 8-bit sketches" in banner_text(
        made.runtime, answers="here", metrics="there"
    )
    made.runtime.ledger._metrics = Metrics(registry)
    _, summaries = play(made)
    cells = sum(summary["sample"]["sketched"]["cells"] for summary in summaries)
    label = {"quantizer": "int4_token_group"}
    assert registry.get_sample_value("witcert_sketched_bound_count", label) == cells > 0
    assert registry.get_sample_value("witcert_sketched_bound_over_true_tv_bucket", {**label, "le": "1.0"}) == 0
    assert registry.get_sample_value("witcert_audit_violations_total", label) == 0
    missed = sum(sum(summary["sample"]["sketched"]["rows_not_sketched"].values()) for summary in summaries)
    shown = [s.value for m in registry.collect() for s in m.samples if s.name == "witcert_rows_not_sketched_total"]
    assert sum(shown) == missed > 0
    assert "sketches bound the total variation by" in render_sentence(summaries[0])
    assert any("have no sketch of every token" in render_sentence(summary) for summary in summaries)
