"""Every cell of forced answers: its true TV and what each bound says of it on the same radii.

Answers are fed in, not sampled, so queries do not depend on the dither and the probabilistic tier claims what it says.
Shapes: C cells collected, H query heads, S tokens a row sees.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from witcert_core.cache.layer_witness import DitherSlots
from witcert_core.errors import InputError
from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.audit import Read
from witcert_core.meter.bounds import FORM_NAMES, joint
from witcert_core.meter.budget import Budget
from witcert_core.meter.cells import bounds_of
from witcert_core.meter.measure import measure_rows
from witcert_core.meter.protocols import Radii
from witcert_core.meter.sums import AccField
from witcert_core.meter.tv import softmax_with_sink
from witcert_core.policy.model import GateSettings
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.models.attention import ModelAttention
from witcert_core.serving.passes import RowPlan
from witcert_core.serving.storage.simulated import SimulatedStorage

METER = "meter"
JOINT = "joint"
FORMS = (*FORM_NAMES, METER, JOINT)
"""The six forms; the meter, the smallest of `tanh`, `jensen` and `needle`; and `bounds.joint`, under the dither law."""
TAU: float = GateSettings().tau
"""What results are told for: the target a gate has by default."""
WITNESS = 0.0
"""The failure probability that stands for the deterministic tier."""


@dataclass
class CellTable:
    """Columns [C], one entry a cell, in the order they were measured.

    num_quantized: tokens it read that are not exact; shares are over the cells that read any, see `measured`.
    bounds[delta][form]: on TV, at most 1, for failure probability delta of a request (0: deterministic).
    floor: what TV is at least, by the meter; 0 without residual sketches.
    """

    deltas: tuple[float, ...]
    sample: Tensor
    layer: Tensor
    head: Tensor
    num_quantized: Tensor
    tv: Tensor
    log_a: Tensor
    floor: Tensor
    bounds: dict[float, dict[str, Tensor]]

    def __len__(self) -> int:
        return self.tv.numel()

    def measured(self) -> CellTable:
        """The cells that read something quantized: of the others there is nothing to certify."""
        read = self.num_quantized > 0
        columns = {f.name: getattr(self, f.name)[read] for f in fields(self) if f.name not in ("deltas", "bounds")}
        bounds = {delta: {form: x[read] for form, x in forms.items()} for delta, forms in self.bounds.items()}
        return CellTable(deltas=self.deltas, bounds=bounds, **columns)


@dataclass
class FormProbe:
    """Looks at every attention call of an offline engine and keeps its cells; see `OfflineEngine`.

    model: its attention. deltas: failure probabilities of a request; 0 for the deterministic tier, others for dithered
    quantizers only.
    """

    model: ModelAttention
    deltas: tuple[float, ...]
    sample: int = 0
    _parts: list[dict[str, Tensor]] = field(default_factory=list)

    def __call__(self, call: AttentionCall, plan: RowPlan, cache: SimulatedStorage) -> None:
        spec, exact = call.spec, cache.store.exact_k.get(call.layer)
        if exact is None:
            raise InputError("the true TV needs exact keys; set meter.audit_every to at least 1")
        numbers = range(len(plan.rows))
        seen, read = [plan.seen_by(n, spec) for n in numbers], functools.partial(cache.pool.read, call.layer)
        q, radii = call.q[plan.tokens], cache.store[call.layer]
        found: dict[str, Tensor] = {}
        for delta in self.deltas:
            first = delta == self.deltas[0]
            delta_loc = [self._delta_loc(delta, row.ordinal) for row in plan.rows]
            summed = measure_rows(
                q,
                read,
                seen,
                spec=spec,
                radii=radii,
                delta_loc=delta_loc,
                form="extremal",
                exact_k=exact,
                audit_rows=torch.full((len(q),), first),
            )
            for form in FORMS[:-1]:
                bounds = bounds_of(summed.terms, "auto" if form == METER else form, spec.has_sink)
                found[f"{delta}/{form}"] = bounds.meter
            together = [self._joint(q[n], seen[n], read, radii, spec, delta_loc[n]) for n in numbers]
            found[f"{delta}/{JOINT}"] = (torch.stack(together) + summed.terms.kernel_tv).clamp(max=1.0)
            if first and summed.audit is not None:
                found["log_a"] = summed.terms.acc[..., AccField.LOG_A]
                found["floor"] = bounds.floor  # the meter's, the last of the forms
                found["num_quantized"], found["tv"] = summed.num_quantized, summed.audit.tv
        shape = found["tv"].shape
        found["head"] = torch.arange(shape[1]).expand(shape)
        found["layer"], found["sample"] = (torch.full(shape, value) for value in (call.layer, self.sample))
        self._parts.append({name: value.flatten() for name, value in found.items()})

    @staticmethod
    def _joint(q: Tensor, slots: Tensor, read: Read, radii: Radii, spec: AttentionSpec, delta_loc: float) -> Tensor:
        """`bounds.joint` [H] of the row q [H, D] that sees `slots` [S]; 1 where no dither bounds its errors."""
        if delta_loc == 0 or not isinstance(radii, DitherSlots):
            return torch.ones(len(q), dtype=torch.float64)
        query = q.to(torch.float64)
        law = radii.dither_law(query, slots, abs(spec.sm_scale))
        weights = softmax_with_sink(spec.logits(query, read(slots)[0].to(torch.float64)), spec.sinks)
        sigma, bias, certain = (
            torch.nn.functional.pad(x, (0, weights.shape[-1] - x.shape[-1])) for x in (law.sigma, law.bias, law.certain)
        )
        return joint.bound(weights, sigma, bias, certain, delta_loc)

    def table(self) -> CellTable:
        """All cells so far; InputError if there is none."""
        if not self._parts:
            raise InputError("no cell was measured: answers of one token never read the cache")
        columns = {name: torch.cat([part[name] for part in self._parts]) for name in self._parts[0]}
        return CellTable(
            deltas=self.deltas,
            sample=columns["sample"],
            layer=columns["layer"],
            head=columns["head"],
            num_quantized=columns["num_quantized"],
            tv=columns["tv"],
            log_a=columns["log_a"],
            floor=columns["floor"],
            bounds={delta: {form: columns[f"{delta}/{form}"] for form in FORMS} for delta in self.deltas},
        )

    def _delta_loc(self, delta: float, ordinal: int) -> float:
        if delta == WITNESS:
            return 0.0
        budget = Budget(delta=delta, num_layers=len(self.model.layers), num_qo_heads=self.model.num_qo_heads)
        return budget.delta_loc(ordinal)


def violations(table: CellTable) -> dict[str, dict[str, int]]:
    """Cells whose true TV is above a bound, by delta and form: anything but 0 for delta 0 is a fault."""
    return {
        label(delta): {form: int((table.tv > bound).sum()) for form, bound in table.bounds[delta].items()}
        for delta in table.deltas
    }


def label(delta: float) -> str:
    """How a failure probability is written in results."""
    return "deterministic" if delta == WITNESS else f"{delta:g}"


def coverage(bound: Tensor, taus: Sequence[float]) -> list[float | None]:
    """Share of the cells [C] certified at each tau: bound at most tau; None of no cell."""
    return [float((bound <= tau).double().mean()) if bound.numel() else None for tau in taus]


def finite_or_word(value: float) -> float | str:
    """For strict JSON."""
    return value if math.isfinite(value) else "inf"
