"""One forward pass, as storages, summers and gates see it in each of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from witcert_core.serving.calls import AttendsQuantized
from witcert_core.serving.passes import RowPlan
from witcert_core.serving.steps import StepCells


@dataclass
class Pass:
    """A pass that writes `slots` [N] on their device: its metered rows and what was found of them so far.

    What layers need on that device is copied there by the first of them that asks, and the same for all.
    """

    plan: RowPlan
    step: StepCells
    slots: Tensor

    @property
    def device(self) -> torch.device:
        return self.slots.device

    @cached_property
    def attends_quantized(self) -> AttendsQuantized:
        return AttendsQuantized(self.plan.attends_quantized, self.plan.new_tokens, self.device)

    @cached_property
    def tokens(self) -> Tensor:
        """Int64 [R] places of the metered rows' queries among the new tokens."""
        return self.plan.tokens.to(self.device)

    @cached_property
    def deltas(self) -> list[float]:
        """What each cell of a metered row may spend of the failure budget, by row."""
        return [row.delta_loc for row in self.plan.rows]

    @property
    def spends(self) -> bool:
        """Whether any row is metered under the dither law, so that deterministic bounds are taken beside it."""
        return any(delta > 0 for delta in self.deltas)

    @cached_property
    def nothing(self) -> list[float]:
        """What those deterministic bounds spend."""
        return [0.0] * len(self.plan.rows)
