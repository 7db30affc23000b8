"""One metered attention call: rows of the pass in, cells (and, with a repairing gate, better outputs) out."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from witcert_core.meter import CellBatch, Radii, Read, Summed, measure_rows
from witcert_core.repair import BlockRepairer, LayerCall, RequestRows
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.rows import RowPlan
from witcert_core.serving.step import StepCells, Verdict


def observe(
    step: StepCells,
    plan: RowPlan,
    call: AttentionCall,
    seen: list[Tensor],
    read: Read,
    radii: Radii,
    exact_k: Tensor | None,
    delta_loc: list[float],
    form: str,
) -> None:
    """Measure the planned rows; under the dither law once more deterministically.

    seen: per row, where its tokens are, in the terms of `read`, `radii` and exact_k [SLOTS, Hkv, D], for audits.
    """

    def summed(delta: list[float], audit: bool) -> Summed:
        return measure_rows(
            call.q[plan.tokens],
            read,
            seen,
            radii=radii,
            sm_scale=call.sm_scale,
            delta_loc=delta,
            logits_soft_cap=call.logits_soft_cap,
            window_left=call.window_left,
            sinks=call.sinks,
            form=form,
            exact_k=exact_k,
            audit_rows=plan.audited if audit else None,
        )

    step.summed[call.layer] = summed(delta_loc, exact_k is not None)
    if any(delta > 0 for delta in delta_loc):
        step.witness_summed[call.layer] = summed([0.0] * len(delta_loc), False)


def gate(
    step: StepCells,
    plan: RowPlan,
    call: LayerCall,
    rows: Tensor,
    outputs: Tensor,
    repairer: BlockRepairer,
    delta_loc: list[float],
) -> None:
    """Gate `rows` [R, H, D] request by request; outputs [TOKENS, H, Dv] of the layer get the repaired rows."""
    found: list[CellBatch] = []
    certain: list[CellBatch] = []
    for index in sorted({row.request for row in plan.rows}):
        numbers = plan.of_request(index)
        request = RequestRows(
            request_id=step.request_ids[index],
            q=rows[numbers],
            positions=torch.tensor([plan.rows[n].position for n in numbers]),
            slots=plan.slots_of(numbers[-1]),
            delta_loc=min(delta_loc[n] for n in numbers),
            audited=plan.audited[numbers],
        )
        outcome = repairer.run(call, request)
        tokens = plan.tokens[numbers]
        for head, output in outcome.outputs.items():
            group = output.shape[1]
            outputs[tokens, head * group : (head + 1) * group] = output.to(outputs.dtype)
        step.verdicts.append(
            Verdict(index, outcome.status, outcome.repaired_blocks, outcome.repaired_bytes, outcome.gave_up)
        )
        found.append(outcome.cells)
        certain.append(outcome.witness_cells or outcome.cells)
    step.layers[call.layer] = joined(found)
    if any(delta > 0 for delta in delta_loc):
        step.witness_layers[call.layer] = joined(certain)


def joined(batches: list[CellBatch]) -> CellBatch:
    """The rows of several batches one after the other; rows of a batch that was not audited are NaN in `tv_audit`."""
    audited = any(batch.tv_audit is not None for batch in batches)

    def column(name: str) -> Tensor | None:
        parts = [getattr(batch, name) for batch in batches]
        if name == "tv_audit":
            if not audited:
                return None
            parts = [
                torch.full_like(b.meter, float("nan")) if p is None else p for b, p in zip(batches, parts, strict=True)
            ]
        return torch.cat(parts)

    return CellBatch(**{field.name: column(field.name) for field in fields(CellBatch)})  # type: ignore[arg-type]
