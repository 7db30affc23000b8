"""What every gate must keep to, as checks that name the broken promise; plugins can use them too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from inspect import isclass
from typing import get_args

import torch
from torch import Tensor

from witcert_core.errors import PluginError
from witcert_core.policy.gate_registry import check_class
from witcert_core.policy.gates import Action, CellStatus, Gate, GateDecision, GateState, misses_target

NUM_CELLS, NUM_BLOCKS = 4, 6
_NAN, _INF = float("nan"), float("inf")


def check_gate(gate: Gate) -> None:
    """Raise PluginError unless the gate keeps its contract.

    It decides from the state alone: the same again for the same, nothing written to. Its answer is a GateDecision with
    a status for each cell; it names a block only if it `repairs`, and one that is not exact yet, whose copy is kept and
    that the budget pays for; it says why it gives up; asked again and again it ends. It calls no cell exact, which is
    the caller's to say, and none within target whose bounds are above its `tau` and `tau_out` (of a gate with these and
    a `target`), or say nothing.

    Example:
        >>> from dataclasses import dataclass
        >>> import witcert_core as wc
        >>> from witcert_core import CellStatus, GateDecision
        >>> @dataclass(frozen=True)
        ... class Hopeful:
        ...     name = "hopeful"
        ...     repairs = False
        ...     def decide(self, state):
        ...         return GateDecision("accept", (state.meter * 0).long() + CellStatus.WITHIN_TARGET)
        >>> wc.check_gate(Hopeful())
        Traceback (most recent call last):
        ...
        witcert_core.errors.PluginError: gate 'hopeful': calls a cell within target whose bounds are 1.0 and inf
    """
    if isclass(gate):
        raise PluginError(f"{gate.__qualname__} is a class; check an instance: check_gate({gate.__qualname__}(...))")
    check_class(type(gate))
    for state in _states():
        try:
            _check_loop(gate, state)
        except Exception as error:
            cause = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
            raise PluginError(f"gate {gate.name!r}: {cause}") from error


def _states() -> Iterator[GateState]:
    """Evaluations of every kind: good, saturated, unknown and infinite; budgets and copies that run out."""
    kinds: list[tuple[float, float, float]] = [  # meter, log A, relative output bound
        (0.05, 0.1, 0.02),
        (0.6, 1.2, 0.5),
        (1.0, 40.0, _INF),
        (1.0, _INF, _NAN),
        (0.0, 0.0, 0.0),
        (0.05, 0.1, 3.0),
    ]
    generator = torch.Generator().manual_seed(0)
    chosen = [[number] * NUM_CELLS for number in range(len(kinds))]
    chosen += torch.randint(0, len(kinds), (12, NUM_CELLS), generator=generator).tolist()
    for case, cells in enumerate(chosen):
        meter, log_a, out_rel = torch.tensor([kinds[cell] for cell in cells], dtype=torch.float64).unbind(1)
        risk = torch.rand(NUM_BLOCKS, generator=generator, dtype=torch.float64)
        if case % 3 == 0:
            risk[case % NUM_BLOCKS] = _INF
        least = torch.rand(NUM_CELLS, generator=generator, dtype=torch.float64) * 0.2
        yield GateState(
            meter=meter,
            log_a=log_a,
            out_rel=out_rel,
            first_meter=meter.clone(),
            block_risk=risk,
            repaired=torch.rand(NUM_BLOCKS, generator=generator) < 0.3,
            available=torch.rand(NUM_BLOCKS, generator=generator) < 0.7,
            block_bytes=100,
            bytes_left=(None, 0, 250)[case % 3],
            value_risk=None if case % 2 else risk.flip(0),
            out_least=None if case % 4 == 1 else least,
        )


def _check_loop(gate: Gate, state: GateState) -> None:
    """Ask until the gate is content, granting each repair and improving nothing, as repairs may."""
    for _ in range(NUM_BLOCKS + 1):
        decision = _check_decision(gate, state)
        if decision.block is None:
            return
        repaired = state.repaired.clone()
        repaired[decision.block] = True
        left = None if state.bytes_left is None else state.bytes_left - state.block_bytes
        state = replace(state, repaired=repaired, bytes_left=left)
    raise PluginError(f"asks for more than the {NUM_BLOCKS} blocks there are; it would never end")


def _check_decision(gate: Gate, state: GateState) -> GateDecision:
    before = {name: value.clone() for name, value in _tensors(state)}
    decision = gate.decide(state)
    if any(not _equal(value, before[name]) for name, value in _tensors(state)):
        raise PluginError("writes to the tensors it is shown; decide from copies")
    if not isinstance(decision, GateDecision):
        raise PluginError(f"decided {decision!r}; decide must return a GateDecision")
    if not isinstance(decision.status, Tensor):
        raise PluginError(f"status is {decision.status!r}; expected a tensor, torch.int64 {list(state.meter.shape)}")
    again = gate.decide(state)
    same = (again.action, again.block, again.reason) == (decision.action, decision.block, decision.reason)
    if not same or not _equal(again.status, decision.status):
        raise PluginError("decides otherwise for the same state; decide from the state alone")
    if decision.action not in get_args(Action):
        raise PluginError(f"action is {decision.action!r}; allowed: {', '.join(get_args(Action))}")
    _check_status(gate, state, decision.status)
    _check_block(gate, state, decision)
    if decision.action == "give_up" and not decision.reason:
        raise PluginError("gives up without a reason; say why, reports show it")
    return decision


def _check_status(gate: Gate, state: GateState, status: Tensor) -> None:
    if status.dtype != torch.int64 or status.shape != state.meter.shape:
        raise PluginError(
            f"status is {status.dtype} {list(status.shape)}; expected torch.int64 {list(state.meter.shape)}, one a cell"
        )
    known = set(CellStatus) - {CellStatus.EXACT}
    for code in status.tolist():
        if code not in known:
            names = ", ".join(f"{kind.name} {kind.value}" for kind in sorted(known))
            raise PluginError(f"status {code} is not a gate's to give; allowed: {names}")
    within = status == CellStatus.WITHIN_TARGET
    settings = {field.name: getattr(gate, field.name) for field in fields(gate)}  # type: ignore[arg-type]
    if {"target", "tau", "tau_out"} <= settings.keys():
        over_tv, over_output = misses_target(state, settings["target"], settings["tau"], settings["tau_out"])
        missed = over_tv | over_output
    else:
        missed = ~(state.meter < 1) & ~state.out_rel.isfinite()
    for wrong in (within & missed).nonzero()[:, 0].tolist():
        bounds = f"{float(state.meter[wrong]):.2} and {float(state.out_rel[wrong]):.2}"
        raise PluginError(f"calls a cell within target whose bounds are {bounds}")


def _check_block(gate: Gate, state: GateState, decision: GateDecision) -> None:
    block = decision.block
    if (decision.action == "repair") != (block is not None):
        raise PluginError(f"action {decision.action!r} comes with block {block}; repair names one, the others none")
    if block is None:
        return
    if not isinstance(block, int) or isinstance(block, bool):
        raise PluginError(f"asks for block {block!r}; expected its number, an int")
    if not gate.repairs:
        raise PluginError("asks for a repair, though its repairs is False")
    if not 0 <= block < NUM_BLOCKS or bool(state.repaired[block]):
        raise PluginError(f"asks for block {block} of {NUM_BLOCKS}, which is exact already or does not exist")
    if not bool(state.available[block]):
        raise PluginError(f"asks for block {block}, whose exact copy is gone (available)")
    if state.bytes_left is not None and state.bytes_left < state.block_bytes:
        raise PluginError(f"asks for a block of {state.block_bytes} bytes with {state.bytes_left} left")


def _tensors(state: GateState) -> Iterator[tuple[str, Tensor]]:
    for field in fields(state):
        value = getattr(state, field.name)
        if isinstance(value, Tensor):
            yield field.name, value


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.double().nan_to_num(-1.0), other.double().nan_to_num(-1.0))
