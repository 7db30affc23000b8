"""Repairing gates on SGLang's own pool: what was certified is what is served."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from audits import audit_of
from engine import HKV, LAYERS, D, Engine, gated
from layer_pool import attention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from witcert_core.policy.gates import CellStatus

pytestmark = pytest.mark.sglang


def test_a_sketch_spares_blocks() -> None:
    repaired = {}
    for bits in (0, 4):
        engine = gated("int4_token_group", meter={"sketch_bits": bits}, target="tv")
        engine.step([17, 31], ForwardMode.EXTEND)
        step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
        repaired[bits] = sum(outcome.repaired_blocks for outcome in step.verdicts)
        assert all((audit_of(cells) <= cells.meter).all() for cells in step.layers.values())
    assert 0 < repaired[4] < 0.5 * repaired[0]


@pytest.mark.parametrize("name", ["fp8_e4m3_cast", "int4_token_group", "int2_token_group", "int8_dither"])
def test_a_certified_step_serves_what_it_certified(name: str) -> None:
    """Every cell ends within both targets, and the output that goes on is attention over the repaired cache."""
    engine = gated(name)
    engine.step([17, 31], ForwardMode.EXTEND)
    for _ in range(3):
        step, queries, outputs = engine.step([1, 1], ForwardMode.DECODE)
        for layer in range(LAYERS):
            cells = step.layers[layer]
            assert (cells.meter <= 0.2).all()
            assert (cells.out_bound <= 0.1 * cells.out_norm * (1 + 1e-9)).all()
            assert (audit_of(cells) <= cells.meter).all()
            for i, count in enumerate(engine.lens):
                out, compressed = attention(queries[layer][i], *engine.stored(layer, i, count))
                exact_out, exact = attention(
                    queries[layer][i], engine.exact[layer]["k"][i, :count], engine.exact[layer]["v"][i, :count]
                )
                assert torch.allclose(outputs[layer][i].double(), out, atol=1e-4)
                assert ((exact - compressed).abs().sum(-1) / 2 <= cells.meter[i]).all()
                assert ((exact_out - out).norm(dim=-1) <= cells.out_bound[i]).all()
    repaired = sum(outcome.repaired_blocks for outcome in step.verdicts)
    for number, outcome in enumerate(step.verdicts):  # layer by layer, both requests
        read = step.layers[number // 2].num_quantized[number % 2] > 0
        assert torch.equal(outcome.status[0] == CellStatus.WITHIN_TARGET, read)
        assert torch.equal(outcome.status[0] == CellStatus.EXACT, ~read)  # all that it reads was restored
    assert repaired <= 2 * LAYERS * HKV * 14


def test_a_block_is_paged_in_at_most_once() -> None:
    engine = gated("int2_token_group")
    engine.step([16, 32], ForwardMode.EXTEND)
    moved: Counter[int] = Counter()
    for _ in range(4):
        step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
        for outcome in step.verdicts:
            moved[outcome.index] += outcome.repaired_bytes
    per_token = 2 * D * 4
    for index, count in enumerate(engine.lens):
        assert 0 < moved[index] <= LAYERS * HKV * count * per_token


def test_rows_over_a_quantized_prefix_are_gated_too() -> None:
    engine = gated("int2_token_group")
    engine.step([9, 14], ForwardMode.EXTEND)
    step, queries, outputs = engine.step([6, 5], ForwardMode.EXTEND)
    assert len(step.rows) == 11
    assert all((cells.meter <= 0.2).all() for cells in step.layers.values())
    assert sum(outcome.repaired_blocks for outcome in step.verdicts) > 0
    token = 0
    for i, (old, new) in enumerate(((9, 6), (14, 5))):
        k, v = engine.stored(1, i, old)
        for offset in range(new):
            own_k, own_v = (engine.exact[1][kind][i, old : old + offset + 1] for kind in "kv")
            out, _ = attention(queries[1][token], torch.cat([k, own_k]), torch.cat([v, own_v]))
            assert torch.allclose(outputs[1][token].double(), out, atol=1e-4)
            token += 1


def test_without_copies_a_step_is_not_certified_and_says_so() -> None:
    engine = gated("int2_token_group", copy_bytes=LAYERS * HKV * 2 * D * 4 * 3)  # room for three slots
    engine.step([17, 31], ForwardMode.EXTEND)
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    reasons = {outcome.gave_up for outcome in step.verdicts}
    assert any("copies of the blocks left are gone" in reason for reason in reasons)
    worst = max(cells.meter.max() for cells in step.layers.values())
    assert worst > 0.2
    assert any((outcome.status == CellStatus.ABOVE_TARGET).any() for outcome in step.verdicts)


def test_the_page_in_budget_is_kept() -> None:
    budget = 6 * 4 * 2 * D * 4
    engine = gated("int2_token_group", max_pagein_bytes=budget)
    engine.step([17, 31], ForwardMode.EXTEND)
    moved: Counter[int] = Counter()
    for _ in range(3):
        step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
        for outcome in step.verdicts:
            moved[outcome.index] += outcome.repaired_bytes
    assert max(moved.values()) <= budget
    assert any("budget" in outcome.gave_up for outcome in step.verdicts)


def test_the_ranking_gate_touches_saturated_cells_only() -> None:
    engine = gated("int8_token_group", kind="risk_ranked")
    engine.step([17, 31], ForwardMode.EXTEND)
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    assert all(outcome.repaired_blocks == 0 for outcome in step.verdicts)
    engine = gated("int2_token_group", kind="risk_ranked")
    engine.step([17, 31], ForwardMode.EXTEND)
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    assert any(outcome.repaired_blocks for outcome in step.verdicts)


def test_gated_measurements_equal_ungated_ones_where_nothing_was_repaired() -> None:
    steps = []
    for build in (Engine, gated):
        sections: dict[str, Any] = {"meter": {"sketch_bits": 4}}
        if build is gated:
            sections |= {"tau": 1.0, "target": "tv"}
        engine = build("int8_token_group", **sections)  # seeds the generator
        engine.step([17, 31], ForwardMode.EXTEND)
        steps.append(engine.step([1, 1], ForwardMode.DECODE)[0])
    ours, theirs = steps
    for layer in range(LAYERS):
        for name in ("meter", "log_a", "out_bound", "out_norm", "tv_audit"):
            a, b = getattr(ours.layers[layer], name), getattr(theirs.layers[layer], name)
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12), name
