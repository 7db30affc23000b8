"""The dither law is claimed of texts that do not depend on the dither they read; no request spends its delta twice.

Requests are served pass by pass over one layer of an engine's pool; a second request then reads what a first one left.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_layer import SCALE, OneLayer

from witcert_core.meter.budget import Budget
from witcert_core.report.claims import AFTER_ITS_ANSWER, NOT_FROM_ITS_START, SAMPLED_PREFIX
from witcert_core.report.counts import LAW_WITHDRAWN
from witcert_core.serving import passes
from witcert_core.serving.forgotten import Forgotten
from witcert_core.serving.passes import RequestPass, RowPlanner
from witcert_core.serving.storage.simulated import SimulatedStorage

FIRST, ANSWER, MORE = torch.arange(1, 9), torch.arange(10, 14), torch.arange(20, 25)


class Served(OneLayer):
    """And a first request that others go on from."""

    def first_turn(self) -> None:
        """A prompt in FIRST, and an answer in ANSWER."""
        self.step("first", FIRST, 8, True)
        for n in range(1, 5):
            self.step("first", torch.cat([FIRST, ANSWER[:n]]), 1, False)


@pytest.fixture
def served() -> Served:
    engine = Served()
    engine.first_turn()
    return engine


def test_a_text_over_sampled_tokens_of_another_request_is_claimed_under_tier_w_alone(served: Served) -> None:
    before = served.summary("first")
    assert (before["tier"], before["deterministic_beside"]["cells"]) == ("probabilistic", before["cells_measured"])
    step = served.step("second", torch.cat([FIRST, ANSWER, MORE]), 5, True)
    assert (step.layers[0].delta_loc == 0).all()
    assert not step.deterministic_layers
    served.step("second", torch.cat([FIRST, ANSWER, MORE, torch.tensor([30])]), 1, False)
    summary = served.summary("second")
    assert summary["tier"] == "deterministic"
    assert summary["tier_cells"] == {"deterministic": summary["cells_measured"]}
    assert summary["delta"] == {"request": 0.0, "spent": 0.0}
    assert summary["claim"].startswith("deterministic tier: any query")
    assert SAMPLED_PREFIX in summary["claim"]


def test_a_text_over_a_cached_prompt_alone_keeps_tier_d(served: Served) -> None:
    served.step("second", torch.cat([FIRST, MORE]), 5, True)
    served.step("second", torch.cat([FIRST, MORE, torch.tensor([30])]), 1, False)
    summary = served.summary("second")
    assert summary["tier"] == "probabilistic"
    assert "texts fixed before the cached prefix was written" in summary["claim"]


def test_no_query_aligned_with_the_dither_it_has_seen_passes_what_is_claimed() -> None:
    """A client that knows the errors of a cached prefix asks along them: the law's radius is left, the claim holds.

    From a first turn of one token and its answer; the second turn's own key is far away.
    """
    passed = 0
    for seed in range(6):
        served = Served()
        torch.manual_seed(seed)
        pair = torch.tensor([1, 10])
        served.step("first", pair[:1], 1, True)
        served.step("first", pair, 1, False)
        errors = (served.k - served.exact)[pair, 0].double()
        along = (errors[0] - errors[1]) / (errors[0] - errors[1]).norm()
        for number, size in enumerate((10.0, 100.0, 300.0, 1000.0)):
            slots = torch.tensor([1, 10, 20 + number])
            q = along * size
            step = served.step(f"second-{number}", slots, 1, True, q=q, k=-along * 50)
            stored, exact = (x[slots, 0].double() @ q * SCALE for x in (served.k, served.exact))
            tv = 0.5 * float((stored.softmax(0) - exact.softmax(0)).abs().sum())
            assert tv <= step.layers[0].meter[0, 0]
            law = Budget(0.01, 1, 1).delta_loc(1)
            storage = served.runtime.groups[0].cache.storage
            assert isinstance(storage, SimulatedStorage)
            side = storage.store[0]
            radius = side.key_radius(q[None], slots, SCALE, law)[0, :2]
            passed += bool(((stored - exact)[:2].abs() > radius).any())
    assert passed > 0  # under the probabilistic tier's radii the claim would have been broken


@pytest.mark.parametrize("generated", [0, 1])
def test_slots_that_an_engine_exchanges_after_a_chunk_are_looked_at(served: Served, generated: int) -> None:
    """SGLang gives a running request the slots of an equal prefix that another one has put into its tree, before its
    first generated token or, with the overlap scheduler, before the second."""
    step = served.step("second", torch.arange(40, 52), 12, True)
    for _ in range(generated):
        step = served.step("second", torch.arange(40, 53), 1, False)
    assert (step.layers[0].delta_loc > 0).all()
    exchanged = torch.cat([FIRST, ANSWER, torch.arange(52, 53 + generated)])
    step = served.step("second", exchanged, 1, False)
    assert (step.layers[0].delta_loc == 0).all()
    summary = served.summary("second")
    assert summary["tier"] == "deterministic"
    assert summary["tier_cells"] == {"deterministic": 1}
    # Of twelve prompt rows max_rows were metered.
    assert summary["unknown_reasons"][LAW_WITHDRAWN] == 8 + generated
    assert summary["tv_certified_cells"] <= summary["cells_measured"] == 1


def test_a_preempted_request_keeps_its_claim_and_marks_what_it_computes_again_as_sampled(served: Served) -> None:
    again = torch.arange(40, 53)
    served.step("first", again, 13, True)  # prompt, answer and the token sampled last, in one chunk
    assert served.summary("first")["tier"] == "probabilistic"
    step = served.step("second", torch.cat([again[:9], MORE]), 5, True)
    assert step.without_law == {0: SAMPLED_PREFIX}
    step = served.step("third", torch.cat([again[:8], MORE]), 5, True)
    assert step.without_law == {}


def test_a_first_answer_token_that_a_preemption_turned_into_prompt_counts_as_sampled() -> None:
    served = Served()
    served.step("first", FIRST, 8, True)  # a token is sampled and never written
    again = torch.arange(40, 49)
    served.step("first", again, 9, True)
    step = served.step("second", torch.cat([again, MORE]), 5, True)
    assert step.without_law == {0: SAMPLED_PREFIX}


def test_a_session_whose_prompt_goes_on_after_its_own_answer_claims_tier_w(served: Served) -> None:
    """vLLM's streaming input appends to the prompt of a running request what its client wrote after an answer."""
    step = served.step("first", torch.cat([FIRST, ANSWER, MORE]), 5, True)
    assert (step.layers[0].delta_loc == 0).all()
    summary = served.summary("first")
    assert summary["tier"] == "deterministic"
    assert AFTER_ITS_ANSWER in summary["claim"]


def test_slots_filled_from_elsewhere_count_as_sampled(served: Served) -> None:
    served.runtime.moved(torch.arange(40, 44), ANSWER)
    served.runtime.overwritten(torch.arange(50, 52))
    for number, slots in enumerate((torch.arange(40, 44), torch.arange(50, 52))):
        step = served.step(f"r{number}", torch.cat([FIRST, slots, MORE]), 5, True)
        assert step.without_law == {0: SAMPLED_PREFIX}


def test_slots_written_again_by_a_prompt_are_sampled_no_more(served: Served) -> None:
    served.step("other", ANSWER, 4, True)
    step = served.step("second", torch.cat([ANSWER, MORE]), 5, True)
    assert step.without_law == {}


def test_the_deterministic_tier_traces_nothing() -> None:
    served = Served(tier="deterministic")
    served.first_turn()
    assert served.runtime.groups[0].generated is None
    step = served.step("second", torch.cat([FIRST, ANSWER, MORE]), 5, True)
    assert step.without_law == {}
    assert served.summary("second")["claim"].startswith("deterministic tier: any query; ")


# The budget of a request ------------------------------------------------------------------------------------------


def test_a_request_forgotten_among_many_spends_its_delta_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MAX_TRACKED_REQUESTS", 3)
    served = Served(stride=1)
    served.step("victim", FIRST, 8, True)
    slots = FIRST
    ordinals: list[int] = []
    for turn in range(3):
        for _ in range(4):
            slots = torch.cat([slots, slots[-1:] + 1])
            step = served.step("victim", slots, 1, False)
            assert bool(step.without_law) == (turn > 0)
            ordinals += [row.ordinal for row in step.rows]
        for number in range(3):
            served.runtime.planner.request(f"other-{turn}-{number}")
        assert not served.runtime.planner.knows("victim")
    assert ordinals == sorted(set(ordinals))  # no row of the budget's series is used twice
    summary = served.summary("victim")
    assert NOT_FROM_ITS_START in summary["claim"]
    assert summary["tier"] == "deterministic"
    assert summary["delta"]["spent"] <= 0.01
    served.step("other-0-0", torch.arange(50, 54), 4, True)
    assert served.summary("other-0-0")["tier"] == "deterministic"  # forgotten: an id in use may not be new


def test_a_request_that_begins_with_a_generated_token_has_no_delta() -> None:
    """No request begins so: its earlier passes were another's of the same id, or not seen here."""
    served = Served()
    served.step("twice", FIRST, 8, True)
    served.runtime.forget("twice")
    step = served.step("twice", torch.cat([FIRST, ANSWER[:1]]), 1, False)
    assert (step.layers[0].delta_loc == 0).all()
    assert step.without_law == {0: NOT_FROM_ITS_START}


def test_a_finished_id_may_be_used_again() -> None:
    planner = RowPlanner(stride=1, max_rows=1, audit_every=0, stored_prefill=True)
    for _ in range(2):
        plan = planner.plan([RequestPass("r", FIRST, 8, True)])
        assert [row.ordinal for row in plan.rows] == [1]
        assert plan.without_law == {}
        planner.forget("r")


@settings(deadline=None)
@given(st.sets(st.text(), max_size=40), st.text())
def test_what_was_forgotten_is_never_counted_too_low(ids: set[str], other: str) -> None:
    kept = Forgotten()
    for count, name in enumerate(sorted(ids)):
        kept.add(name, count)
    assert all(kept.metered(name) == count for count, name in enumerate(sorted(ids)))
    kept.add(other, 2)
    counted = kept.metered(other)
    assert counted is not None
    assert counted >= 2
    assert Forgotten().metered(other) is None
