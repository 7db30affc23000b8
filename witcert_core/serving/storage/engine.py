"""`quantizer: engine`: the engine writes and quantizes as it likes, and what it stored is read back and metered."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from witcert_core.serving.calls import AttentionCall, Quantized
from witcert_core.serving.passes import RowPlan
from witcert_core.serving.steps import StepCells
from witcert_core.serving.storage import measuring
from witcert_core.serving.storage.gathered import gather
from witcert_core.serving.storage.simulated import SimulatedCache


class EngineCache(SimulatedCache):
    """The pool as a black box. `pool.read` gives what attention makes of the stored bytes, scales included.

    Whether a chunk reads its own exact keys is the engine's doing; `call.attends_quantized` must say what it does.
    """

    reads_engine = True

    def moved(self, target: Tensor, source: Tensor) -> None:
        """The engine copied rows; whether their scales went along is not known."""
        self.overwritten(target)

    def attend(self, call: AttentionCall, plan: RowPlan, step: StepCells, deltas: list[float]) -> Tensor:
        """The engine's attention as it is, then the cells of what it read."""
        # A copy: engines divide keys by their scale in place before they store them.
        call = replace(call, exact_k=call.exact_k.clone(), exact_v=call.exact_v.clone())
        out = call.run(None, None)
        exact = Quantized(call.exact_k, None), Quantized(call.exact_v, None)
        self._account(call, *exact)
        if plan.rows and call.layer in self.metered_layers:
            self._measure_read(call, plan, step, deltas, out)
        return out

    def _measure_read(
        self, call: AttentionCall, plan: RowPlan, step: StepCells, deltas: list[float], out: Tensor
    ) -> None:
        """Meter the planned rows over what their requests read, chunks that read themselves exactly included."""
        side, own = self.store[call.layer], call.read_exactly
        read = gather(plan.requests, side, lambda flat: self.pool.read(call.layer, flat), own, plan.new_tokens)
        exact_k = self.store.exact_k.get(call.layer)
        audited = None if exact_k is None else exact_k[read.slots]
        seen, form = read.seen(plan.rows), self.policy.meter.form
        heads = out.view(-1, self.geometry.num_qo_heads, self.geometry.v_head_dim)
        made = [row if read.knows(places) else None for row, places in zip(heads[plan.tokens], seen, strict=True)]
        measuring.observe(step, plan, call, seen, read.read, read.radii, audited, deltas, form, made)
