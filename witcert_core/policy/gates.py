"""What to do about a step whose bounds are too high: pure decisions, no tensors of the cache touched.

The loop is the caller's: evaluate, ask the gate, repair the one block it names, evaluate again. Repairing a
block can raise a bound, and even the true distance, so nothing is ever inferred from a repair; a verdict
always comes from the evaluation it was given. Every repair takes a block that was not repaired before, so the
loop ends after at most as many rounds as there are blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

SATURATED = 0.9
"""At this bound a cell is told next to nothing, and certifying it would cost most of its blocks."""

Target = Literal["tv", "output", "both"]
Action = Literal["accept", "repair", "give_up"]


class CellStatus(IntEnum):
    """What may be said of a cell once the gate is done.

    Example:
        >>> import witcert_core as wc
        >>> wc.CellStatus(1).name
        'WITHIN_TARGET'
    """

    OBSERVED = 0
    """Measured; nothing was promised."""
    WITHIN_TARGET = 1
    """Its bounds are within the target at the last evaluation."""
    RANKED = 2
    """Its risk was brought below the ranking threshold; nothing is promised."""
    ABOVE_TARGET = 3
    """Above the target, and no repair is left."""
    EXACT = 4
    """It reads nothing quantized, so nothing is asked of it; said by the caller, whatever a gate decides."""


@dataclass(frozen=True)
class GateState:
    """One layer and KV head at one step, as just evaluated: ``C`` cells (query heads, rows) and ``N`` blocks.

    Args:
        meter: ``[C]`` bound on TV; of a cell that reads nothing quantized all four columns are 0.
        log_a: ``[C]`` unclipped ``log A``.
        out_rel: ``[C]`` output bound relative to the output's norm.
        first_meter: ``[C]`` the bound at the step's first evaluation, before any repair.
        block_risk: ``[N]`` ``sum p~ (e^c - 1)`` over the block and the cells, see :func:`block_risk`.
        repaired: bool ``[N]``, blocks already exact.
        available: bool ``[N]``, blocks whose exact copy is still kept.
        block_bytes: cost of paging one block in.
        bytes_left: page-in budget that remains, ``None`` for no limit.
        value_risk: ``[N]`` ``sum p~ rho / ||o~||``, counted when only the output target is missed.
        out_least: ``[C]`` what of ``out_rel`` no repair takes away, the attention kernel's own arithmetic.

    Example:
        >>> import torch, witcert_core as wc
        >>> one, no = torch.tensor([0.7]), torch.tensor([False])
        >>> state = wc.GateState(one, one, one, one, block_risk=one, repaired=no, available=~no, block_bytes=4096)
        >>> policy = wc.Policy(version=1, quantizer={"name": "int4_token_group"}, gate={"kind": "certified"})
        >>> policy.resolved_gate.decide(state).action
        'repair'
    """

    meter: Tensor
    log_a: Tensor
    out_rel: Tensor
    first_meter: Tensor
    block_risk: Tensor
    repaired: Tensor
    available: Tensor
    block_bytes: int
    bytes_left: int | None = None
    value_risk: Tensor | None = None
    out_least: Tensor | None = None


@dataclass(frozen=True)
class GateDecision:
    """The gate's answer.

    Args:
        action: ``accept`` (nothing more to do), ``repair`` (make ``block`` exact, evaluate, ask again) or
            ``give_up`` (some cell stays above its target; ``reason`` says why).
        status: int64 ``[C]`` of :class:`CellStatus`; of use once the action is not ``repair``.

    Example:
        >>> import torch, witcert_core as wc
        >>> status = torch.tensor([wc.CellStatus.WITHIN_TARGET, wc.CellStatus.ABOVE_TARGET])
        >>> wc.GateDecision("repair", status, block=3).block
        3
    """

    action: Action
    status: Tensor
    block: int | None = None
    reason: str = ""


class Gate(Protocol):
    """What decides which blocks are made exact: a frozen dataclass.

    Its fields target, tau, tau_out and risk_tau get the values of the policy's `gate` section, others of its `params`.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch, witcert_core as wc
        >>> @wc.register
        ... @dataclass(frozen=True)
        ... class Strict:
        ...     tau: float = 0.2
        ...     name = "strict"
        ...     repairs = True
        ...     def decide(self, state):
        ...         within = state.meter <= self.tau
        ...         status = torch.where(within, wc.CellStatus.WITHIN_TARGET, wc.CellStatus.ABOVE_TARGET).long()
        ...         if bool(within.all()):
        ...             return wc.GateDecision("accept", status)
        ...         closed = ~state.repaired & state.available
        ...         poor = state.bytes_left is not None and state.bytes_left < state.block_bytes
        ...         if poor or not bool(closed.any()):
        ...             return wc.GateDecision("give_up", status, reason="nothing is left to repair")
        ...         riskiest = torch.where(closed, state.block_risk, -1).argmax()
        ...         return wc.GateDecision("repair", status, block=int(riskiest))
        >>> wc.check_gate(Strict())
    """

    name: ClassVar[str]
    repairs: ClassVar[bool]

    def decide(self, state: GateState) -> GateDecision:
        """Answer for one evaluation; equal states get equal answers."""
        ...


def block_risk(p: Tensor, c: Tensor, block_of: Tensor, num_blocks: int, known: Tensor | None = None) -> Tensor:
    """``sum p~ (e^c - 1)`` per block, float64 ``[..., N]``; infinite where a radius of the block is unknown.

    Args:
        p: ``[..., C, S]`` weights.
        c: ``[..., C, S]`` radii.
        block_of: int64 ``[S]``, the block of each token.
        num_blocks: ``N``.
        known: ``[..., C, S]`` weight that a sketch says was moved at each token; it counts beside what is not known.
    """
    growth = p.to(torch.float64) * torch.expm1(c.to(torch.float64))
    if known is not None:
        growth = growth + known
    growth = torch.where(c.isfinite(), growth, float("inf")).nan_to_num(nan=float("inf"), posinf=float("inf"))
    of_token = growth.sum(dim=-2)
    total = torch.zeros(*of_token.shape[:-1], num_blocks, dtype=torch.float64, device=p.device)
    return total.index_add(-1, block_of, of_token)


def misses_target(state: GateState, target: Target, tau: float, tau_out: float) -> tuple[Tensor, Tensor]:
    """Cells above ``tau`` and above ``tau_out``, both bool ``[C]``; NaN counts, a target not asked never."""
    over_tv = ~(state.meter <= tau)
    over_output = ~(state.out_rel <= tau_out)
    none = torch.zeros_like(over_tv)
    return (none if target == "output" else over_tv), (none if target == "tv" else over_output)


def beyond_repair(state: GateState, over_output: Tensor, tau_out: float) -> Tensor:
    """Bool ``[C]``: of the cells above their output target, those that would be with everything exact.

    What is infinite may become known by a repair, so it is asked for.
    """
    if state.out_least is None:
        return torch.zeros_like(over_output)
    return over_output & (state.out_least > tau_out) & state.out_least.isfinite()


def risk_threshold(risk_tau: float) -> float:
    """``ln(1 + 2 tau) / 2``: the ``log A`` at which the published bound ``(A^2 - 1)/2`` equals ``tau``."""
    return 0.5 * math.log1p(2.0 * risk_tau)


ARITHMETIC = "the attention kernel's own arithmetic alone is above tau_out"


def _next(
    state: GateState, wanting: Tensor, status: Tensor, by_output: bool, hopeless: Tensor | None = None
) -> GateDecision:
    """Repair the riskiest block that can be, unless nothing is wanting, or only what is `hopeless`."""
    if not bool(wanting.any()):
        if hopeless is not None and bool(hopeless.any()):
            return GateDecision("give_up", status, reason=ARITHMETIC)
        return GateDecision("accept", status)
    if bool(state.repaired.all()):
        return GateDecision("give_up", status, reason="every block is exact and the bound is still too high")
    open_blocks = ~state.repaired & state.available
    if not bool(open_blocks.any()):
        return GateDecision("give_up", status, reason="the exact copies of the blocks left are gone")
    if state.bytes_left is not None and state.bytes_left < state.block_bytes:
        return GateDecision("give_up", status, reason="the page-in budget is spent")
    risk = state.block_risk
    if by_output and state.value_risk is not None:
        risk = risk + state.value_risk
    risk = risk.nan_to_num(nan=float("inf"), posinf=float("inf"))
    block = int(torch.where(open_blocks, risk, -1.0).argmax())
    return GateDecision("repair", status, block=block)


@dataclass(frozen=True)
class Observe:
    """Never repairs."""

    name: ClassVar[str] = "observe"
    repairs: ClassVar[bool] = False

    def decide(self, state: GateState) -> GateDecision:
        """Accept whatever was measured."""
        return GateDecision("accept", torch.full_like(state.meter, CellStatus.OBSERVED, dtype=torch.int64))


@dataclass(frozen=True)
class Certified:
    """Repair until every cell is within the target; the claim is that of the last evaluation."""

    target: Target = "both"
    tau: float = 0.2
    tau_out: float = 0.1
    name: ClassVar[str] = "certified"
    repairs: ClassVar[bool] = True

    def decide(self, state: GateState) -> GateDecision:
        """Repair while some cell is above ``tau`` or ``tau_out``."""
        over_tv, over_output = misses_target(state, self.target, self.tau, self.tau_out)
        hopeless = beyond_repair(state, over_output, self.tau_out)
        wanting = over_tv | (over_output & ~hopeless)
        missed = over_tv | over_output
        status = torch.where(missed, CellStatus.ABOVE_TARGET, CellStatus.WITHIN_TARGET).to(torch.int64)
        return _next(state, wanting, status, by_output=not bool(over_tv.any()), hopeless=hopeless)


@dataclass(frozen=True)
class RiskRanked:
    """Bring the risk of saturated cells down, promising nothing: repair while ``log A`` is too high."""

    risk_tau: float = 5.0
    saturation: float = SATURATED
    name: ClassVar[str] = "risk_ranked"
    repairs: ClassVar[bool] = True

    def decide(self, state: GateState) -> GateDecision:
        """Repair while a cell that began the step saturated has ``log A`` above the threshold."""
        saturated = ~(state.first_meter < self.saturation)
        wanting = saturated & ~(state.log_a <= risk_threshold(self.risk_tau))
        status = torch.where(saturated, CellStatus.RANKED, CellStatus.OBSERVED)
        status = torch.where(wanting, CellStatus.ABOVE_TARGET, status).to(torch.int64)
        return _next(state, wanting, status, by_output=False)


@dataclass(frozen=True)
class Combined:
    """Certify cells whose bound says something, rank the saturated ones; the report tells them apart.

    A cell is saturated by its bound at the start of the step. One that ends within the target is certified
    all the same.
    """

    target: Target = "both"
    tau: float = 0.2
    tau_out: float = 0.1
    risk_tau: float = 5.0
    saturation: float = SATURATED
    name: ClassVar[str] = "combined"
    repairs: ClassVar[bool] = True

    def decide(self, state: GateState) -> GateDecision:
        """Repair while an informative cell misses its target or a saturated one its threshold."""
        over_tv, over_output = misses_target(state, self.target, self.tau, self.tau_out)
        missed = over_tv | over_output
        saturated = ~(state.first_meter < self.saturation)
        risky = ~(state.log_a <= risk_threshold(self.risk_tau))
        hopeless = beyond_repair(state, over_output, self.tau_out)
        asked = ~saturated | risky
        wanting = asked & (over_tv | (over_output & ~hopeless))
        status = torch.where(missed & asked, CellStatus.ABOVE_TARGET, CellStatus.RANKED)
        status = torch.where(missed, status, CellStatus.WITHIN_TARGET).to(torch.int64)
        by_output = not bool((wanting & (over_tv | saturated)).any())
        return _next(state, wanting, status, by_output, hopeless & asked)
