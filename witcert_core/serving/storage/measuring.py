"""One metered attention call: rows of the pass in, cells (and, with a repairing gate, better outputs) out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from witcert_core.meter.audit import Audit, FormatError, Read
from witcert_core.meter.cells import CellBatch, Terms
from witcert_core.meter.measure import Summed, measure_rows
from witcert_core.meter.protocols import Radii
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.passes import Attends, ReadRow, RowPlan
from witcert_core.serving.steps import StepCells, Verdict
from witcert_core.serving.storage.gated_rows import LayerCall, RequestRows
from witcert_core.serving.storage.repair import BlockRepairer


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
    outputs: Sequence[Tensor | None],
) -> None:
    """Measure the planned rows; under the dither law once more deterministically.

    seen: per row, where its tokens are, in the terms of `read`, `radii` and exact_k [SLOTS, Hkv, D], for audits, as are
    outputs: per row what the engine made of it, [H, Dv], None where what it read is not known.
    """

    def summed(delta: list[float], audit: bool) -> Summed:
        return measure_rows(
            call.q[plan.tokens],
            read,
            seen,
            spec=call.spec,
            radii=radii,
            delta_loc=delta,
            form=form,
            exact_k=exact_k,
            audit_rows=plan.audited if audit else None,
            outputs=outputs,
        )

    step.summed[call.layer] = summed(delta_loc, exact_k is not None)
    places = [call.spec.visible(slots) for slots in seen]
    compare(step, plan, call, call.q[plan.tokens], lambda number: read(places[number]))
    if any(delta > 0 for delta in delta_loc):
        step.deterministic_summed[call.layer] = summed([0.0] * len(delta_loc), False)


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
    indices = sorted({row.request for row in plan.rows})
    places = [plan.of_request(index) for index in indices]
    requests = [
        RequestRows(
            request_id=step.request_ids[index],
            q=rows[numbers],
            positions=torch.tensor([plan.rows[n].position for n in numbers]),
            slots=plan.slots_of(numbers[-1]),
            delta_loc=min(delta_loc[n] for n in numbers),
            audited=plan.audited[numbers],
            outputs=outputs[plan.tokens[numbers]],
        )
        for index, numbers in zip(indices, places, strict=True)
    ]

    def read(number: int) -> tuple[Tensor, Tensor]:
        return call.pool.read(call.layer, plan.seen_by(number, call.spec))

    outcomes = repairer.run(call, requests)
    compare(step, plan, call, rows, read)
    for index, numbers, outcome in zip(indices, places, outcomes, strict=True):
        tokens = plan.tokens[numbers]
        for head, output in outcome.outputs.items():
            group = output.shape[1]
            outputs[tokens, head * group : (head + 1) * group] = output.to(outputs.dtype)
        step.verdicts.append(
            Verdict(index, outcome.status, outcome.repaired_blocks, outcome.repaired_bytes, outcome.gave_up)
        )
    step.summed[call.layer] = stacked([outcome.cells for outcome in outcomes])
    if any(delta > 0 for delta in delta_loc):
        step.deterministic_summed[call.layer] = stacked(
            [outcome.deterministic_cells or outcome.cells for outcome in outcomes]
        )


def compare(
    step: StepCells,
    plan: RowPlan,
    call: Attends,
    rows: Tensor,
    read: ReadRow,
    numbers: Sequence[int] | None = None,
    format_error: FormatError | None = None,
) -> None:
    """Keep the truth about the audited rows of sampled requests, and the bounds of the sketched ones: of all rows
    [R, H, D], or of those named. format_error: of `measure_rows`, by slot."""
    every = range(len(plan.rows)) if numbers is None else numbers
    if plan.sample is not None:
        step.know(call.layer, plan.sample.compare(call, rows, plan, read, every))
    if plan.sketches is not None:
        step.bound_by_sketches(call.layer, plan.sketches.bound(call, rows, plan, read, every, format_error))


def stacked(parts: list[Summed]) -> Summed:
    """The rows of several sums of one layer one after the other."""
    terms = Terms(*(torch.cat([getattr(part.terms, f.name) for part in parts]) for f in fields(Terms)))
    return Summed(
        terms,
        parts[0].form,
        parts[0].has_sink,
        torch.cat([part.num_visible for part in parts]),
        torch.cat([part.num_quantized for part in parts]),
        _stacked_audits([(part.audit, part.terms.norm) for part in parts]),
        torch.cat([part.delta_loc for part in parts]),
    )


def _stacked_audits(parts: list[tuple[Audit | None, Tensor]]) -> Audit | None:
    tv, excess = (
        audits([(None if audit is None else getattr(audit, field.name), like.cpu()) for audit, like in parts])
        for field in fields(Audit)
    )
    return None if tv is None or excess is None else Audit(tv, excess)


def audits(parts: list[tuple[Tensor | None, Tensor]]) -> Tensor | None:
    """What was found of the rows of several batches, each with a tensor of its shape: NaN where nothing was audited."""
    if all(found is None for found, _ in parts):
        return None
    return torch.cat([torch.full_like(like, float("nan")) if found is None else found for found, like in parts])


def joined(batches: list[CellBatch]) -> CellBatch:
    """The rows of several batches one after the other; rows of a batch that was not audited are NaN in its audit."""

    def column(name: str) -> Tensor | None:
        if name in ("tv_audit", "excess"):
            return audits([(getattr(batch, name), batch.meter) for batch in batches])
        return torch.cat([getattr(batch, name) for batch in batches])

    return CellBatch(**{field.name: column(field.name) for field in fields(CellBatch)})  # type: ignore[arg-type]
