"""Verified drafts, pass by pass over one layer: what is counted is the text that is served, whatever was guessed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from layer_pool import LayerPool, attention
from torch import Tensor

from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.budget import Budget
from witcert_core.policy.model import parse_policy
from witcert_core.quantizers.rotary import RotarySpec
from witcert_core.report.claims import ADAPTIVE_DRAFTS
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.passes import RequestPass, RowPlanner
from witcert_core.serving.runtime import Runtime
from witcert_core.serving.steps import StepCells

D, HEADS, SLOTS, PROMPT, TEXT = 64, 2, 128, 20, 60
WRONG = -1
"""A token that is not the text's."""


def tensors(position: int, token: int) -> Tensor:
    """Query, key and value [3, HEADS, D] of a token, as if from a model."""
    return torch.randn(3, HEADS, D, generator=torch.Generator().manual_seed(1000 * position + token + 1)) * 2


class Engine:
    """One layer that attends exactly as it stores; serves the text 0, 1, 2, ... of one request."""

    def __init__(self, quantizer: str, without_law: str = "", **sections: Any) -> None:
        self.pool = LayerPool(torch.zeros(SLOTS, HEADS, D), torch.zeros(SLOTS, HEADS, D))
        policy = parse_policy({"version": 1, "quantizer": {"name": quantizer}, **sections})
        heads = tuple(range(HEADS))
        geometry = Geometry("test", HEADS, (0,), HEADS, HEADS, heads, D, D, SLOTS, torch.float32, RotarySpec(D), "cpu")
        self.runtime = Runtime("test", policy, geometry, self.pool, None, without_law=without_law)
        self.slots = torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(2)) + 1
        self.found: dict[int, Tensor] = {}
        """Bounds [HEADS] of served rows by position."""

    def step(self, first: int, tokens: list[int], drafts: int, prefilling: bool, right: int) -> StepCells:
        """One pass over `tokens` from position `first` on, of whose drafts `right` turn out to be."""
        length = first + len(tokens)
        q, k, v = torch.stack([tensors(first + i, token) for i, token in enumerate(tokens)], 1)
        own, places = self.slots[first:length], torch.arange(first, length)
        request = RequestPass("r", self.slots[:length], len(tokens), prefilling, drafts=drafts)
        self.runtime.begin([request], own)

        def run(own_k: Tensor | None, own_v: Tensor | None) -> Tensor:
            self.pool.write(0, own, k if own_k is None else own_k, v if own_v is None else own_v)
            seen = [self.pool.read(0, self.slots[: place + 1]) for place in places]
            return torch.stack([attention(mine, *read)[0] for mine, read in zip(q, seen, strict=True)]).float()

        self.runtime.attend(AttentionCall(0, q, k, v, own, places, AttentionSpec(D**-0.5), run))
        step = self.runtime.end()
        assert step is not None
        for number, row in enumerate(step.rows):
            if row.draft <= right:
                self.found[row.position] = step.layers[0].meter[number]
        step.count(self.runtime.ledger, {0}, {0: right})
        return step

    def serve(self, guesses: random.Random | None) -> dict[str, Any]:
        """The summary of the whole text; with `guesses`, up to four drafts a pass, of which some are wrong."""
        self.step(0, list(range(PROMPT)), 0, True, 0)
        first = PROMPT
        while first < TEXT:
            drafts = min(guesses.randint(0, 4), TEXT - 1 - first) if guesses else 0
            right = guesses.randint(0, drafts) if guesses else 0
            tokens = [first + i if i <= right else WRONG for i in range(1 + drafts)]
            self.step(first, tokens, drafts, False, right)
            first += 1 + right
        return self.runtime.finish("r", "stop")


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("prefill_reads", ["chunk_exact", "stored"])
def test_what_is_counted_is_the_text_that_is_served(stride: int, prefill_reads: str) -> None:
    every = {"stride": stride, "audit_every": 1, "sketch_share": 1.0}
    sections: dict[str, Any] = {"meter": every, "prefill_reads": prefill_reads}
    plain, drafted = Engine("int4_token_group", **sections), Engine("int4_token_group", **sections)
    theirs, ours = plain.serve(None), drafted.serve(random.Random(1))
    rejected = ours.pop("rows_rejected")
    assert rejected > 10 / stride
    assert theirs.pop("rows_rejected") == 0
    assert plain.found.keys() == drafted.found.keys()
    for position, meter in plain.found.items():
        torch.testing.assert_close(drafted.found[position], meter, rtol=1e-4, atol=1e-5)  # float32 sums of other splits
    for summary in (ours, theirs):
        assert summary["audit"]["violations"] == summary["audit"]["mismatches"] == 0
        assert summary["rows_seen"] == (TEXT if prefill_reads == "stored" else TEXT - PROMPT)
        summary["worst"].pop("step")  # how many rows were metered before it
    numbers = {key: value for key, value in theirs.items() if isinstance(value, int)}
    assert {key: ours[key] for key in numbers} == numbers
    our_sketches, their_sketches = (summary["sample"]["sketched"] for summary in (ours, theirs))
    assert our_sketches["cells"] == their_sketches["cells"] > 0
    assert ours["unknown_reasons"] == theirs["unknown_reasons"]


def test_every_metered_row_spends_and_its_dither_is_its_passs_own() -> None:
    engine = Engine("int8_dither", meter={"stride": 1, "audit_every": 1})
    engine.step(0, list(range(PROMPT)), 0, True, 0)
    before = engine.step(PROMPT, [PROMPT, WRONG, WRONG], 2, False, 0)
    pass_ids = engine.runtime.groups[0].pass_ids
    wrong = pass_ids[engine.slots[PROMPT + 1 : PROMPT + 3]].tolist()
    codes = engine.pool.k[engine.slots[PROMPT + 1]].clone()
    engine.step(PROMPT + 1, [PROMPT + 1, WRONG], 1, False, 0)
    again = pass_ids[engine.slots[PROMPT + 1 : PROMPT + 3]].tolist()
    assert wrong == [2, 2]
    assert again == [3, 3]
    assert not torch.equal(engine.pool.k[engine.slots[PROMPT + 1]], codes)
    assert [row.draft for row in before.rows] == [0, 1, 2]
    budget = Budget(delta=0.01, num_layers=1, num_qo_heads=HEADS)
    summary = engine.runtime.finish("r", "stop")
    assert (summary["rows_metered"], summary["rows_rejected"]) == (2, 3)
    assert summary["delta"]["spent"] == pytest.approx(HEADS * sum(budget.delta_loc(t) for t in range(1, 6)))
    assert summary["tier"] == "probabilistic"


def test_a_broken_bound_of_a_rejected_row_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine("int4_token_group", meter={"stride": 1, "audit_every": 1})
    engine.step(0, list(range(PROMPT)), 0, True, 0)
    settle = StepCells.settle

    def settled(step: StepCells) -> None:
        settle(step)
        step.layers[0].meter[1] = 0.0  # the draft's

    monkeypatch.setattr(StepCells, "settle", settled)
    engine.step(PROMPT, [PROMPT, WRONG], 1, False, 0)
    audit = engine.runtime.finish("r", "stop")["audit"]
    assert (audit["cells"], audit["violations"]) == (HEADS, HEADS)


def test_drafts_that_follow_from_the_cache_leave_the_deterministic_tier() -> None:
    summary = Engine("int8_dither", ADAPTIVE_DRAFTS, meter={"stride": 1, "audit_every": 1}).serve(random.Random(2))
    assert (summary["tier"], summary["delta"]["spent"], summary["audit"]["violations"]) == ("deterministic", 0, 0)
    assert ADAPTIVE_DRAFTS in summary["claim"]


def test_placeholders_behind_a_prompt_are_no_rows_of_it() -> None:
    """An engine may pad the last token of a prompt with drafts that cannot be right."""
    planner = RowPlanner(stride=1, max_rows=8, audit_every=0, stored_prefill=False)
    plan = planner.plan([RequestPass("r", torch.arange(10), 4, True, drafts=3)])
    assert [(row.token, row.position, row.draft) for row in plan.rows] == [(0, 6, 0)]
    assert plan.attends_quantized == [False]
    assert plan.unmetered == {(0, "stride"): 3}
    assert plan.generated == [3]
    assert [slots.tolist() for slots in plan.certain] == [list(range(7))]
    engine = Engine("int4_token_group")
    step = StepCells(["r"], [], unmetered=plan.unmetered, drafts=plan.drafts)
    step.count(engine.runtime.ledger, {0})
    assert engine.runtime.finish("r", "stop")["rows_seen"] == 0
