import dataclasses
import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from cell_makers import total_variation_of_errors
from torch import Tensor

from witcert_core.meter.bounds import FORMS, meter
from witcert_core.meter.sums import AccField, accumulate
from witcert_core.policy.gate_registry import GateRegistry
from witcert_core.policy.gates import (
    CellStatus,
    Certified,
    Combined,
    Gate,
    GateDecision,
    GateState,
    Observe,
    RiskRanked,
    block_risk,
    risk_threshold,
)

BLOCK = 4


def state(
    meter: tuple[float, ...] = (0.1,),
    log_a: tuple[float, ...] = (0.1,),
    out_rel: tuple[float, ...] = (0.01,),
    risk: tuple[float, ...] = (1.0, 2.0, 0.5),
    **other: Any,
) -> GateState:
    values: dict[str, Any] = {
        "meter": torch.tensor(meter),
        "log_a": torch.tensor(log_a),
        "out_rel": torch.tensor(out_rel),
        "first_meter": torch.tensor(meter),
        "block_risk": torch.tensor(risk),
        "repaired": torch.zeros(len(risk), dtype=torch.bool),
        "available": torch.ones(len(risk), dtype=torch.bool),
        "block_bytes": 100,
    }
    return GateState(**(values | other))


class Cache:
    """Logits, radii and blocks of a toy step; repairing a block makes its errors and radii zero."""

    def __init__(self, scale: float, tokens: int = 32, cells: int = 4, seed: int = 0) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.exact = torch.randn(cells, tokens, generator=gen, dtype=torch.float64) * 2
        self.c = scale * torch.rand(cells, tokens, generator=gen, dtype=torch.float64)
        self.eps = self.c * (2 * torch.rand(cells, tokens, generator=gen, dtype=torch.float64) - 1)
        self.block_of = torch.arange(tokens) // BLOCK
        self.repaired = torch.zeros(tokens // BLOCK, dtype=torch.bool)
        self.first: Tensor | None = None

    def evaluate(self, **other: Any) -> GateState:
        open_token = ~self.repaired[self.block_of]
        z, c = self.exact + self.eps * open_token, self.c * open_token
        acc = accumulate(z, c)
        value, _ = meter(acc)
        self.first = value if self.first is None else self.first
        p = torch.softmax(z, -1)
        self.truth = total_variation_of_errors(p, self.eps * open_token)
        values: dict[str, Any] = {
            "meter": value,
            "log_a": acc[:, AccField.LOG_A],
            "out_rel": torch.zeros_like(value),
            "first_meter": self.first,
            "block_risk": block_risk(p, c, self.block_of, len(self.repaired)),
            "repaired": self.repaired.clone(),
            "available": torch.ones_like(self.repaired),
            "block_bytes": 1,
        }
        return GateState(**(values | other))

    def run(self, gate: Gate, **other: Any) -> tuple[GateState, GateDecision, list[int]]:
        """The caller's loop; returns the last state, the last decision and the order of repairs."""
        order: list[int] = []
        while True:
            now = self.evaluate(**{k: v - len(order) if k == "bytes_left" else v for k, v in other.items()})
            decision = gate.decide(now)
            if decision.action != "repair":
                return now, decision, order
            assert decision.block is not None
            assert decision.block not in order
            order.append(decision.block)
            self.repaired[decision.block] = True


@pytest.mark.parametrize("scale", [0.05, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("tau", [0.02, 0.2])
def test_certified_ends_within_tau_after_at_most_as_many_rounds_as_blocks(scale: float, tau: float) -> None:
    cache = Cache(scale)
    now, decision, order = cache.run(Certified("tv", tau=tau))
    assert decision.action == "accept"
    assert decision.status.tolist() == [CellStatus.WITHIN_TARGET] * 4
    assert bool((now.meter <= tau).all())
    assert bool((cache.truth <= now.meter).all())
    assert len(order) <= len(cache.repaired)
    assert cache.first is not None
    assert (len(order) > 0) == (float(cache.first.max()) > tau)


def test_the_riskiest_unrepaired_block_comes_first() -> None:
    now = state(meter=(0.9,), risk=(1.0, 5.0, math.inf))
    assert Certified().decide(now).block == 2
    assert Certified().decide(replace(now, repaired=torch.tensor([False, False, True]))).block == 1
    assert Certified().decide(replace(now, block_risk=torch.tensor([1.0, math.nan, 3.0]))).block == 1


def test_block_risk_sums_over_tokens_and_cells() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.9, 0.0]], dtype=torch.float64)
    c = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, math.inf]], dtype=torch.float64)
    risk = block_risk(p, c, torch.tensor([0, 0, 2]), 3)
    expected = 0.5 * math.expm1(0.1) + 0.25 * math.expm1(0.2) + 0.1 * math.expm1(0.4) + 0.9 * math.expm1(0.5)
    assert risk[0].item() == pytest.approx(expected)
    assert risk[1:].tolist() == [0.0, math.inf]


@pytest.mark.parametrize("gate", [Certified(), RiskRanked(), Combined()], ids=lambda gate: gate.name)
@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"bytes_left": 99}, "budget"),
        ({"available": torch.zeros(3, dtype=torch.bool)}, "gone"),
        ({"repaired": torch.ones(3, dtype=torch.bool)}, "every block is exact"),
    ],
)
def test_what_cannot_be_repaired_is_not_certified_and_says_why(gate: Gate, other: dict[str, Any], reason: str) -> None:
    decision = gate.decide(state(meter=(1.0,), log_a=(9.0,), **other))
    assert decision.action == "give_up"
    assert reason in decision.reason
    assert decision.status.tolist() == [CellStatus.ABOVE_TARGET]


@pytest.mark.parametrize("gate", [Certified(), Combined()], ids=lambda gate: gate.name)
def test_no_block_is_restored_for_what_a_kernel_does_to_exact_ones(gate: Gate) -> None:
    """Of outputs of 100,000 tokens in bfloat16, rounding alone can be above the target."""
    alone = state(out_rel=(0.2, 0.01), meter=(0.1, 0.1), log_a=(0.1, 0.1), out_least=torch.tensor([0.15, 0.001]))
    decision = gate.decide(alone)
    assert (decision.action, decision.block) == ("give_up", None)
    assert "own arithmetic alone is above tau_out" in decision.reason
    assert decision.status.tolist() == [CellStatus.ABOVE_TARGET, CellStatus.WITHIN_TARGET]
    beside = dataclasses.replace(alone, out_rel=torch.tensor([0.2, 0.2]))
    assert gate.decide(beside).action == "repair"
    least = torch.tensor([math.inf, 0.0])
    unknown = dataclasses.replace(alone, out_rel=torch.tensor([math.inf, 0.01]), out_least=least)
    assert gate.decide(unknown).action == "repair"
    spoilt = dataclasses.replace(unknown, repaired=torch.ones(3, dtype=torch.bool))
    assert "every block is exact" in gate.decide(spoilt).reason


def test_a_gone_block_is_passed_over_while_another_can_help() -> None:
    now = state(meter=(0.9,), available=torch.tensor([True, False, True]))
    assert Certified().decide(now).block == 0


def test_a_spent_budget_stops_the_loop_at_what_was_reached() -> None:
    cache = Cache(2.0)
    now, decision, order = cache.run(Certified("tv", tau=0.02), bytes_left=3)
    assert len(order) == 3
    assert decision.action == "give_up"
    over = now.meter > 0.02
    assert decision.status.tolist() == [
        CellStatus.ABOVE_TARGET if high else CellStatus.WITHIN_TARGET for high in over.tolist()
    ]


def test_observe_never_repairs() -> None:
    decision = Observe().decide(state(meter=(1.0,), log_a=(math.inf,)))
    assert (decision.action, decision.status.tolist()) == ("accept", [CellStatus.OBSERVED])


@pytest.mark.parametrize(
    ("target", "meter", "out_rel", "action"),
    [
        ("tv", 0.1, 9.0, "accept"),
        ("tv", 0.3, 0.0, "repair"),
        ("output", 0.9, 0.05, "accept"),
        ("output", 0.0, 0.2, "repair"),
        ("both", 0.1, 0.2, "repair"),
        ("both", 0.3, 0.0, "repair"),
        ("both", 0.2, 0.1, "accept"),
        ("both", math.nan, 0.0, "repair"),
        ("both", 0.0, math.nan, "repair"),
    ],
)
def test_targets(target: Literal["tv", "output", "both"], meter: float, out_rel: float, action: str) -> None:
    now = state(meter=(meter,), out_rel=(out_rel,))
    assert Certified(target).decide(now).action == action
    assert Combined(target).decide(replace(now, first_meter=torch.zeros(1))).action == action


def test_damage_to_values_alone_is_repaired_where_it_is() -> None:
    now = state(out_rel=(9.0,), risk=(0.0, 0.0, 0.0), value_risk=torch.tensor([0.1, 0.0, 0.7]))
    assert Certified().decide(now).block == 2


def test_risk_ranked_repairs_saturated_cells_above_the_threshold_and_promises_nothing() -> None:
    gate = RiskRanked(risk_tau=5.0)
    threshold = 0.5 * math.log(11.0)
    assert risk_threshold(5.0) == pytest.approx(threshold)
    assert gate.decide(state(meter=(1.0,), log_a=(threshold + 0.01,))).action == "repair"
    assert gate.decide(state(meter=(0.5,), log_a=(threshold + 0.01,))).action == "accept"
    calm = gate.decide(state(meter=(1.0, 0.5), log_a=(threshold - 0.01, 0.1), out_rel=(0.0, 0.0)))
    assert calm.action == "accept"
    assert calm.status.tolist() == [CellStatus.RANKED, CellStatus.OBSERVED]
    assert gate.decide(state(meter=(math.nan,), log_a=(math.nan,))).action == "repair"


def test_the_threshold_is_where_the_published_bound_equals_tau() -> None:
    acc = accumulate(torch.zeros(1, 8), torch.full((1, 8), 1.3))
    tau = FORMS["eform"](acc).item()
    assert risk_threshold(tau) == pytest.approx(acc[0, AccField.LOG_A].item(), rel=1e-6)


def test_combined_tells_certified_from_ranked() -> None:
    now = state(
        meter=(0.1, 0.95, 0.95, 0.3),
        log_a=(0.1, 0.5, 2.0, 0.2),
        out_rel=(0.0, 0.0, 0.0, 0.0),
        repaired=torch.ones(3, dtype=torch.bool),
    )
    assert Combined().decide(now).status.tolist() == [
        CellStatus.WITHIN_TARGET,
        CellStatus.RANKED,
        CellStatus.ABOVE_TARGET,
        CellStatus.ABOVE_TARGET,
    ]


def test_combined_never_promises_more_than_the_last_evaluation() -> None:
    for seed in range(10):
        cache = Cache(6.0, seed=seed)
        now, decision, _ = cache.run(Combined("tv"))
        assert decision.action == "accept"
        for status, value in zip(decision.status.tolist(), now.meter.tolist(), strict=True):
            assert (status == CellStatus.WITHIN_TARGET) == (value <= 0.2)
            assert status in (CellStatus.WITHIN_TARGET, CellStatus.RANKED)


def test_repair_is_not_monotone_so_only_evaluation_may_certify() -> None:
    """A shift common to both blocks moves nothing; repairing one of them moves the weights."""
    z, eps = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[0.8, 0.8]], dtype=torch.float64)
    before = total_variation_of_errors(torch.softmax(z + eps, -1), eps)
    half = torch.tensor([[0.0, 0.8]], dtype=torch.float64)
    after = total_variation_of_errors(torch.softmax(z + half, -1), half)
    assert before.item() == 0.0
    assert after.item() > 0.18
    # A bound may rise as well: one half repaired, weight flows to the tokens that keep their radius.
    c = torch.tensor([[0.5, 2.0]], dtype=torch.float64)
    shift = torch.tensor([[3.0, 0.0]], dtype=torch.float64)
    whole, part = accumulate(z + shift, c), accumulate(z, c * torch.tensor([0.0, 1.0]))
    assert FORMS["rms"](part) > FORMS["rms"](whole)
    # The gate sees only what it is shown: the same state, the same answer, whatever was repaired before.
    risen = state(meter=(0.5,), repaired=torch.tensor([True, False, False]))
    assert Certified().decide(risen).action == "repair"


@pytest.mark.parametrize("kind", ["observe", "certified", "risk_ranked", "combined"])
def test_gates_are_built_by_name(kind: str) -> None:
    gate = GateRegistry().build(kind, {"target": "tv", "tau": 0.3, "tau_out": 0.4, "risk_tau": 2.0})
    assert gate.name == kind
    assert gate.repairs == (kind != "observe")
    wanted = {"target": "tv", "tau": 0.3, "tau_out": 0.4, "risk_tau": 2.0}
    assert all(getattr(gate, key) == wanted[key] for key in wanted if hasattr(gate, key))
