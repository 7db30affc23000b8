"""Which rows are metered for probes, what of them is claimed, and that policies without probes are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_layer import OneLayer

from witcert_core.serving.passes import RequestPass, RowPlan, RowPlanner

PROMPT = torch.arange(1, 9)


def enable(owner: Any, text: str, name: str = "p") -> None:
    owner.command({"do": "enable", "id": name, "text": text})


def answer(served: OneLayer, number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = served.runtime.ledger.probes.shown()[number]
    return found


def generate(served: OneLayer, rid: str, count: int, **facts: Any) -> None:
    """A prompt, then `count` tokens."""
    served.step(rid, PROMPT, 8, True, facts=facts)
    for n in range(1, count + 1):
        served.step(rid, torch.arange(1, 9 + n), 1, False, facts=facts)


def test_with_stride_never_nothing_is_metered_until_a_probe_asks() -> None:
    served = OneLayer(stride="never", tier="deterministic", audit_every=0)
    generate(served, "before", 3)
    enable(served.runtime, 'count() where request startswith "a"')
    generate(served, "after", 3)
    generate(served, "other", 3)
    before, after, other = map(served.summary, ("before", "after", "other"))
    assert (before["rows_metered"], before["unknown_reasons"]) == (0, {"stride": 11})
    # Of the prompt, which reads what is stored, every row is asked for.
    assert (after["rows_metered"], after["unknown_reasons"]) == (11, {})
    assert (other["rows_metered"], other["unknown_reasons"]) == (0, {"stride": 11})
    assert (answer(served)["rows"], answer(served)["cells"]["measured"]) == (11, 11)


def test_a_probe_reads_what_the_reports_say() -> None:
    served = OneLayer(stride="never", tier="deterministic")
    enable(served.runtime, "top(1, bound) where phase == generated every 2")
    generate(served, "r", 6)
    (top,), summary = answer(served)["top"], served.summary("r")
    assert summary["rows_metered"] == answer(served)["rows"] == 3
    assert {"meter": top["value"], **{name: top[name] for name in ("layer", "step", "position", "form")}} == {
        name: value for name, value in summary["worst"].items() if name != "q_head"
    }
    assert summary["audit"]["violations"] == 0 < summary["audit"]["cells"]


def test_facts_of_requests_choose_their_rows() -> None:
    served = OneLayer(stride="never", tier="deterministic")
    enable(served.runtime, 'count() by lora where lora == "fin" and prompt > 4')
    generate(served, "a", 2, lora="fin", prompt=8)
    generate(served, "b", 2, lora="", prompt=8)
    assert served.summary("b")["rows_metered"] == 0
    assert answer(served)["groups"] == [{"by": {"lora": "fin"}, "cells": 10}]


def test_a_probe_ends_with_its_rows_and_takes_its_share_of_passes() -> None:
    served = OneLayer(stride="never", tier="deterministic")
    enable(served.runtime, "count() where phase == generated for 2 rows", "few")
    enable(served.runtime, "count() where phase == generated for 25% of passes", "share")
    generate(served, "r", 11)
    few, share = answer(served), answer(served, 1)
    assert (few["rows"], few["ended"]) == (2, "rows")
    assert (share["rows"], share["ended"]) == (3, None)
    assert served.summary("r")["rows_metered"] == 5
    served.runtime.command({"do": "end", "id": "share", "text": "told to"})
    generate(served, "later", 4)
    assert served.summary("later")["rows_metered"] == 0
    assert answer(served, 1)["ended"] == "told to"


def test_rows_of_probes_spend_nothing_and_leave_the_budget_of_others_alone() -> None:
    """Whoever enables a probe may have seen answers: its rows have the deterministic tier alone."""
    deltas = {}
    for probed in (False, True):
        served = OneLayer(stride=2, audit_every=0)
        if probed:
            enable(served.runtime, "max(bound) where phase == generated")
        served.step("r", PROMPT, 8, True)
        steps = [served.step("r", torch.arange(1, 9 + n), 1, False) for n in range(1, 7)]
        deltas[probed] = [float(step.layers[0].delta_loc[0]) if step.rows else None for step in steps]
        summary = served.summary("r")
    assert [x for x in deltas[True] if x] == [x for x in deltas[False] if x]
    assert deltas[True][1::2] == [0.0, 0.0, 0.0]
    assert summary["tier_cells"] == {"deterministic": 3, "probabilistic": 7}
    assert answer(served)["cells"]["measured"] == 6


def test_what_is_not_committed_is_not_seen() -> None:
    served = OneLayer(stride="never", tier="deterministic")
    enable(served.runtime, "count()")
    served.step("r", PROMPT, 8, True, committed=False)
    assert answer(served)["rows"] == 0


def plan(planner: RowPlanner, rid: str, length: int, **more: Any) -> RowPlan:
    return planner.plan([RequestPass(rid, torch.arange(length), 1, False, True, **more)])


def test_every_rank_plans_the_same_rows() -> None:
    """Nothing but passes and commands decides: no clock, no answer."""
    planners = [RowPlanner(stride=3, max_rows=8, audit_every=0, stored_prefill=True) for _ in range(2)]
    for planner in planners:
        enable(planner.watches, "max(bound) where position >= 12 every 2 for 40% of passes, 5 rows, 1 seconds")
    plans = [[plan(planner, "r", length).rows for length in range(9, 60)] for planner in planners]
    assert plans[0] == plans[1]
    assert sum(bool(rows and rows[0].probes) for rows in plans[0]) == 5


def test_rows_that_nothing_can_meter_are_unknown_to_a_probe() -> None:
    planner = RowPlanner(stride=1, max_rows=8, audit_every=0, stored_prefill=True)
    enable(planner.watches, "count() where phase == prompt every 2")
    request = RequestPass("r", PROMPT, 8, True, True, not_followed="decompressed")
    found = planner.plan([request])
    assert found.rows == []
    assert found.lost == {(("p",), 0, "decompressed", False): 4}
    assert found.unmetered == {(0, "decompressed"): 8}


def test_of_drafts_only_those_that_were_right_are_seen() -> None:
    served = OneLayer(stride="never", tier="deterministic")
    served.step("r", PROMPT, 8, True)
    enable(served.runtime, "count() where phase == generated every 2")
    served.step("r", torch.arange(1, 14), 5, False, drafts=4, right=2)
    assert (answer(served)["rows"], answer(served)["cells"]["measured"]) == (2, 2)
    summary = served.summary("r")
    assert (summary["rows_metered"], summary["unknown_reasons"]) == (2, {"stride": 9})


@pytest.mark.parametrize("stride", [1, 3, "never"])
def test_without_a_probe_nothing_is_planned_otherwise(stride: Any) -> None:
    planner = RowPlanner(stride=stride, max_rows=8, audit_every=0, stored_prefill=True)
    plans = [plan(planner, "r", length) for length in range(9, 21)]
    assert [bool(one.rows) for one in plans] == [stride != "never" and n % stride == 0 for n in range(12)]
    assert all(row.charged == row.ordinal and not row.probes for one in plans for row in one.rows)
