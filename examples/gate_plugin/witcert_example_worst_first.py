"""A gate as a plugin: it repairs only where the bound says nothing at all."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from witcert_core import CellStatus, GateDecision, GateState, register


@register
@dataclass(frozen=True)
class WorstFirst:
    """Repair the riskiest block while some cell's bound is 1; of the others the policy's `gate.tau` is promised."""

    tau: float = 0.2
    name: ClassVar[str] = "example_worst_first"
    repairs: ClassVar[bool] = True

    def decide(self, state: GateState) -> GateDecision:
        lost = ~(state.meter < 1)  # NaN is lost too
        status = torch.where(state.meter <= self.tau, CellStatus.WITHIN_TARGET, CellStatus.ABOVE_TARGET).to(torch.int64)
        if not bool(lost.any()):
            return GateDecision("accept", status)
        closed = ~state.repaired & state.available
        if not bool(closed.any()) or (state.bytes_left is not None and state.bytes_left < state.block_bytes):
            return GateDecision("give_up", status, reason="no block is left that can be restored")
        return GateDecision("repair", status, block=int(torch.where(closed, state.block_risk, -1.0).argmax()))
