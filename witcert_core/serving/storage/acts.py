"""Who looks at the metered rows of a layer: they are summed up, audited and compared, or a gate acts on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Protocol

import torch
from torch import Tensor

from witcert_core.cache.protocols import Pool
from witcert_core.meter.audit import Audit, compare_rows
from witcert_core.meter.cells import Terms
from witcert_core.meter.measure import Summed, measure_rows
from witcert_core.serving.device.sums import Sums
from witcert_core.serving.forward import Pass
from witcert_core.serving.passes import Attends, ReadRow
from witcert_core.serving.steps import Verdict
from witcert_core.serving.storage.attended import Attended
from witcert_core.serving.storage.gated_rows import LayerCall, RequestRows
from witcert_core.serving.storage.repair import BlockRepairer


class Acts(Protocol):
    """What is done about the metered rows of a layer."""

    def begin_pass(self) -> None: ...

    def forget(self, request_id: str) -> None: ...

    def look(self, attended: Attended, now: Pass) -> None:
        """Put what was found of the planned rows into the pass; a gate may change them in what goes on."""
        ...


class Summer(Protocol):
    """Who sums over the tokens that rows read."""

    def sums(self, attended: Attended, now: Pass, deltas: Sequence[float]) -> Sums:
        """The sums of the planned rows [R], each cell spending deltas[r] of the failure budget."""
        ...


class TorchSums:
    """In float64, from the tokens themselves."""

    def __init__(self, form: str) -> None:
        self.form = form

    def sums(self, attended: Attended, now: Pass, deltas: Sequence[float]) -> Sums:
        call, tokens = attended.call, attended.tokens
        q, read, seen = call.q[now.tokens], tokens.read, tokens.seen
        return measure_rows(q, read, seen, spec=call.spec, radii=tokens.radii, delta_loc=deltas, form=self.form)


class Observing:
    """Nobody acts: rows are summed up, and what is known of some of them beside is compared with the sums."""

    def __init__(self, summer: Summer) -> None:
        self.summer = summer

    def begin_pass(self) -> None: ...

    def forget(self, request_id: str) -> None: ...

    def look(self, attended: Attended, now: Pass) -> None:
        layer, step = attended.call.layer, now.step
        if attended.sums is None:
            found = self.summer.sums(attended, now, now.deltas)
            deterministic = self.summer.sums(attended, now, now.nothing) if now.spends else None
        else:
            found, deterministic = attended.sums
        step.summed[layer] = replace(found, audit=audit(attended, now))
        if deterministic is not None:
            step.deterministic_summed[layer] = deterministic
        if now.plan.sample is not None or now.plan.sketches is not None:
            call, tokens = attended.call, attended.tokens
            places = [call.spec.visible(seen) for seen in tokens.seen]
            compare(now, call, call.q[now.tokens], lambda number: tokens.read(places[number]), attended)


def audit(attended: Attended, now: Pass) -> Audit | None:
    """The rows of a pass that are audited beside exact keys; None where there are none."""
    if attended.exact_k is None or not any(row.audited for row in now.plan.rows):
        return None
    call, tokens = attended.call, attended.tokens
    if tokens.exact_k is None:
        raise RuntimeError(f"layer {call.layer}: exact keys are kept and none were found for an audit")
    made = zip(attended.heads[now.tokens], tokens.known, strict=True)
    return compare_rows(
        call.q[now.tokens],
        [row if known else None for row, known in made],
        [call.spec.visible(seen) for seen in tokens.seen],
        tokens.read,
        tokens.exact_k.__getitem__,
        now.plan.audited,
        call.spec,
        tokens.format_error,
    )


class Gating:
    """A gate that repairs acts on the rows, request by request; it sums over their tokens itself.

    pool: what it reads and restores blocks in.
    """

    def __init__(self, repairer: BlockRepairer, pool: Pool) -> None:
        self.repairer = repairer
        self.pool = pool

    def begin_pass(self) -> None:
        self.repairer.begin_pass()

    def forget(self, request_id: str) -> None:
        self.repairer.forget(request_id)

    def look(self, attended: Attended, now: Pass) -> None:
        """Rows of `attended.heads` that read what was restored are computed again in place."""
        plan, step, layer = now.plan, now.step, attended.call.layer
        call = LayerCall(layer=layer, pool=self.pool, spec=attended.call.spec, exact_k=attended.exact_k)
        rows, outputs = attended.call.q[now.tokens], attended.heads
        indices = sorted({row.request for row in plan.rows})
        places = [plan.of_request(index) for index in indices]
        requests = [
            RequestRows(
                request_id=step.request_ids[index],
                q=rows[numbers],
                positions=torch.tensor([plan.rows[n].position for n in numbers]),
                slots=plan.slots_of(numbers[-1]),
                delta_loc=min(now.deltas[n] for n in numbers),
                audited=plan.audited[numbers],
                outputs=outputs[plan.tokens[numbers]],
            )
            for index, numbers in zip(indices, places, strict=True)
        ]
        outcomes = self.repairer.run(call, requests)
        compare(now, call, rows, lambda number: self.pool.read(layer, plan.seen_by(number, call.spec)), attended)
        for index, numbers, outcome in zip(indices, places, outcomes, strict=True):
            tokens = plan.tokens[numbers]
            for head, output in outcome.outputs.items():
                group = output.shape[1]
                outputs[tokens, head * group : (head + 1) * group] = output.to(outputs.dtype)
            step.verdicts.append(
                Verdict(index, outcome.status, outcome.repaired_blocks, outcome.repaired_bytes, outcome.gave_up)
            )
        step.summed[layer] = stacked([outcome.cells for outcome in outcomes])
        if now.spends:
            beside = [outcome.deterministic_cells or outcome.cells for outcome in outcomes]
            step.deterministic_summed[layer] = stacked(beside)


def compare(now: Pass, how: Attends, rows: Tensor, read: ReadRow, attended: Attended) -> None:
    """Keep the truth about the audited rows [R, H, D] of sampled requests, and the bounds of the sketched ones."""
    plan, step = now.plan, now.step
    every = range(len(plan.rows))
    if plan.sample is not None:
        step.know(how.layer, plan.sample.compare(how, rows, plan, read, every))
    if plan.sketches is not None:
        error = attended.slot_error
        step.bound_by_sketches(how.layer, plan.sketches.bound(how, rows, plan, read, every, error))


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
    """NaN where nothing was audited."""
    if all(audit is None for audit, _ in parts):
        return None

    def column(name: str) -> Tensor:
        none = (torch.full_like(like.cpu(), float("nan")) for _, like in parts)
        found = zip(parts, none, strict=True)
        return torch.cat([nothing if part[0] is None else getattr(part[0], name) for part, nothing in found])

    return Audit(column("tv"), column("excess"))
