"""The packed cache's decode launches, recorded once and replayed over refilled inputs, against the eager path."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from witcert_core.errors import UnsupportedError
from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.cells import CellBatch
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.device.graphs import CapturedDecode

from .recorder import Recorder
from .test_serving import HKV, HQ, LAYER, PASSES, SCALE, D, Served

ROWS = 3  # of the graph; the batches have two
STEP = [(1, True), (1, True)]


class Graph:
    """One captured layer over static queries, keys and values."""

    def __init__(self, served: Served, max_kv_len: int = 64, **options: Any) -> None:
        self.runtime = served.runtime
        self.captured = CapturedDecode(served.storage, ROWS + 1, max_kv_len, uses_dither=self.runtime.uses_dither)
        self.q, self.k, self.v = (torch.randn(ROWS, h, D) for h in (HQ, HKV, HKV))
        self.captured.begin_capture(ROWS)
        nowhere = torch.zeros(ROWS, dtype=torch.int64)
        static = self.q, self.k, self.v, nowhere, nowhere
        call = AttentionCall(LAYER, *static, AttentionSpec(SCALE, **options), lambda *_: nowhere)
        with Recorder() as self.graph:
            self.out = self.captured.attend(call)

    def replay(self, call: AttentionCall) -> Tensor:
        """A pass of two requests: only static inputs are refilled."""
        runtime, captured = self.runtime, self.captured
        assert runtime.now is not None
        plan = runtime.now.plan
        captured.load(ROWS, torch.cat(plan.requests), [slots.numel() for slots in plan.requests], runtime.now)
        for static, new in ((self.q, call.q), (self.k, call.exact_k), (self.v, call.exact_v)):
            static[:2].copy_(new)
        self.graph.replay()
        captured.read(runtime.now, "auto", padding=1)
        runtime.attention_calls = 1
        return self.out[:2].clone()


@pytest.mark.parametrize(
    ("name", "meter", "options"),
    [
        ("int8_dither_w", {}, {}),
        ("int8_dither_bypass", {"tier": "deterministic"}, {"window_left": 6}),
        ("int8_dither", {}, {"logits_soft_cap": 20.0, "sinks": torch.linspace(-1, 3, HQ)}),
    ],
    ids=["stored witness", "bypass and window", "cap and sinks"],
)
def test_a_replay_is_the_eager_pass(name: str, meter: dict[str, Any], options: dict[str, Any]) -> None:
    """Codes, outputs and every number of every cell; keys of the padding go nowhere."""
    ours, theirs = (Served("kernels", name, audit_every=0, **meter) for _ in range(2))
    graph = Graph(ours, **options)  # before any key is known, as an engine does
    for served in (ours, theirs):
        served.step(PASSES[0], **options)
    for _ in range(2):
        mine, _, out = ours.step(STEP, through=graph.replay, **options)
        other, _, expected = theirs.step(STEP, **options)
        assert torch.equal(out, expected)
        for part in ("k", "v", "k_scale", "v_scale", "k_witness", "k_bypass"):
            a, b = getattr(ours.layer, part), getattr(theirs.layer, part)
            assert a is None or torch.equal(a.nan_to_num(), b.nan_to_num())
        assert mine.lost == {}
        assert mine.deterministic_layers.keys() == other.deterministic_layers.keys()
        for layers, wanted in ((mine.layers, other.layers), (mine.deterministic_layers, other.deterministic_layers)):
            for field in fields(CellBatch):
                a, b = (getattr(found[LAYER], field.name) if found else None for found in (layers, wanted))
                if a is None or b is None:
                    assert a is b, field.name
                else:
                    assert torch.equal(a, b), field.name
        assert (mine.layers[LAYER].meter < 1).all()


def test_what_no_graph_can_hold_is_refused() -> None:
    ours = Served("kernels", "int8_dither", audit_every=0)
    with pytest.raises(UnsupportedError, match="shorten the context"):
        CapturedDecode(ours.storage, 4, 2**20, uses_dither=True)
    graph = Graph(ours)
    ours.step(PASSES[0])
    graph.captured.captured[ROWS].clear()
    with pytest.raises(UnsupportedError, match="graph of 3 rows was captured with attention of layers"):
        ours.step(STEP, through=graph.replay)
    graph.captured.captured[ROWS].add(LAYER)
    graph.captured.max_kv_len = 5
    with pytest.raises(UnsupportedError, match="a request of 15 tokens in a graph for up to 5"):
        ours.step(STEP, through=graph.replay)


def test_the_second_launch_needs_its_counter_too() -> None:
    """A cell is measured only if its deterministic bound is of the same step."""
    ours = Served("kernels", "int8_dither", audit_every=0)
    graph = Graph(ours)
    ours.step(PASSES[0])
    launches = [i for i, op in enumerate(graph.graph.ops) if op[0].name() in ("decode_split", "merge_splits")]
    del graph.graph.ops[launches[-1]], graph.graph.ops[launches[-2]]
    step, _, _ = ours.step(STEP, through=graph.replay)
    assert step.layers == step.deterministic_layers == {}
    assert step.lost == {LAYER: "graph"}


def test_capture_and_refill_never_wait() -> None:
    """The recorder refuses to read numbers; refilling runs under it as well."""
    ours = Served("kernels", "int8_dither", audit_every=0, stride=2)
    graph = Graph(ours)
    ours.step(PASSES[0])

    def load(call: AttentionCall) -> Tensor:
        now = ours.runtime.now
        assert now is not None
        lengths = [slots.numel() for slots in now.plan.requests]
        unmetered = replace(now, plan=replace(now.plan, rows=[]))
        with Recorder():
            graph.captured.load(ROWS, torch.cat(now.plan.requests), lengths, unmetered)
        assert graph.captured.flag.item() == 0
        return graph.replay(call)

    ours.step(STEP, through=load)
