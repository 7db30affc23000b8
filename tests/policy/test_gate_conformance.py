"""`check_gate`: built-in gates keep it, and every promise that a gate can break is named."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from witcert_core import CellStatus, GateDecision, GateState, PluginError, check_gate
from witcert_core.policy.gates import Certified, Combined, Gate, Observe, RiskRanked

SETTINGS = itertools.product(("tv", "output", "both"), (0.04, 0.2, 1.0), (0.01, 0.1, 4.0))


@pytest.mark.parametrize("target_tau_out", SETTINGS, ids=str)
def test_built_in_gates_keep_their_contract(target_tau_out: tuple[str, float, float]) -> None:
    target, tau, tau_out = target_tau_out
    gates: list[Gate] = [
        Observe(),
        Certified(target, tau, tau_out),  # type: ignore[arg-type]
        RiskRanked(10 * tau),
        Combined(target, tau, tau_out, 10 * tau),  # type: ignore[arg-type]
    ]
    for gate in gates:
        check_gate(gate)


def observed(state: GateState) -> torch.Tensor:
    return torch.full_like(state.meter, CellStatus.OBSERVED, dtype=torch.int64)


@dataclass(frozen=True)
class Wrong:
    """A gate that breaks one promise, named by `how`."""

    how: str
    name: ClassVar[str] = "wrong"
    repairs: ClassVar[bool] = True

    def decide(self, state: GateState) -> GateDecision:
        status = observed(state)
        closed = (~state.repaired & state.available).nonzero()[:, 0].tolist()
        if self.how == "writes":
            state.meter.zero_()
            return GateDecision("accept", status)
        if self.how == "no decision":
            return None  # type: ignore[return-value]
        if self.how == "random":
            return GateDecision("give_up", status, reason=str(torch.rand(())))
        if self.how == "action":
            return GateDecision("certify", status)  # type: ignore[arg-type]
        if self.how == "list":
            return GateDecision("accept", status.tolist())  # type: ignore[arg-type]
        if self.how == "tensor":
            return GateDecision("repair", status, block=state.block_risk.argmax())  # type: ignore[arg-type]
        if self.how == "shape":
            return GateDecision("accept", status[:1])
        if self.how == "dtype":
            return GateDecision("accept", status.int())
        if self.how == "exact":
            return GateDecision("accept", status + CellStatus.EXACT)
        if self.how == "within":
            return GateDecision("accept", status + CellStatus.WITHIN_TARGET)
        if self.how == "no block":
            return GateDecision("repair", status)
        if self.how == "a block":
            return GateDecision("accept", status, block=0)
        if self.how == "exact block":
            return GateDecision("repair", status, block=int(state.repaired.double().argmax()))
        if self.how == "gone":
            gone = (~state.repaired & ~state.available).nonzero()[:, 0].tolist()
            return GateDecision("repair", status, block=gone[0]) if gone else GateDecision("accept", status)
        if self.how == "beyond":
            return GateDecision("repair", status, block=state.block_risk.numel())
        if self.how == "spent":
            return GateDecision("repair", status, block=closed[0]) if closed else GateDecision("accept", status)
        if self.how == "silent":
            return GateDecision("give_up", status)
        raise ZeroDivisionError("nothing")


@dataclass(frozen=True)
class Idle(Wrong):
    """Repairs though it says that it does not."""

    repairs: ClassVar[bool] = False


@dataclass(frozen=True)
class Lenient(Certified):
    """Certifies at five times its targets."""

    def decide(self, state: GateState) -> GateDecision:
        return Certified(self.target, 5 * self.tau, 5 * self.tau_out).decide(state)


@pytest.mark.parametrize(
    ("gate", "words"),
    [
        (Wrong("writes"), "writes to the tensors"),
        (Wrong("no decision"), "decide must return a GateDecision"),
        (Wrong("random"), "decides otherwise for the same state"),
        (Wrong("action"), "action is 'certify'; allowed: accept, repair, give_up"),
        (Wrong("list"), r"status is \[0, 0, 0, 0\]; expected a tensor"),
        (Wrong("tensor"), r"asks for block tensor\(\d\); expected its number, an int"),
        (Wrong("shape"), r"status is torch.int64 \[1\]; expected torch.int64 \[4\]"),
        (Wrong("dtype"), r"status is torch.int32 \[4\]"),
        (Wrong("exact"), "status 4 is not a gate's to give"),
        (Wrong("within"), "calls a cell within target whose bounds are 1.0 and inf"),
        (Wrong("no block"), "action 'repair' comes with block None"),
        (Wrong("a block"), "action 'accept' comes with block 0"),
        (Wrong("exact block"), "which is exact already"),
        (Wrong("gone"), "whose exact copy is gone"),
        (Wrong("beyond"), "block 6 of 6"),
        (Wrong("spent"), "of 100 bytes with 0 left"),
        (Wrong("silent"), "gives up without a reason"),
        (Wrong("fails"), "ZeroDivisionError: nothing"),
        (Idle("spent"), "though its repairs is False"),
        (Lenient(), r"calls a cell within target whose bounds are 0\.6 and"),
    ],
    ids=lambda x: getattr(x, "how", ""),
)
def test_a_broken_promise_is_named(gate: Gate, words: str) -> None:
    with pytest.raises(PluginError, match=rf"^gate '\w+': .*{words}"):
        check_gate(gate)


class Unfrozen:
    name = "unfrozen"
    repairs = False

    def decide(self, state: GateState) -> GateDecision:
        return GateDecision("accept", observed(state))


@pytest.mark.parametrize(
    ("gate", "words"),
    [
        (None, "NoneType'> is no gate: expected a frozen dataclass with a method decide"),
        ("observe", "is no gate: expected a frozen dataclass"),
        (Unfrozen(), "Unfrozen'> is no gate: expected a frozen dataclass"),
        (Observe, r"Observe is a class; check an instance: check_gate\(Observe\(\.\.\.\)\)"),
    ],
    ids=str,
)
def test_what_is_no_gate_is_named(gate: Gate, words: str) -> None:
    with pytest.raises(PluginError, match=words):
        check_gate(gate)
