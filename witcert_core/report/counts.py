"""What the ledger keeps of one request: running maxima and counts, never a list that grows.

Shapes: L layers, H query heads of this rank, F bound forms, R rows of a batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from witcert_core.report.records import json_number
from witcert_core.report.risk import MOST_LOG_A, estimate, of_last_layers
from witcert_core.report.sample import SampleCounts

if TYPE_CHECKING:
    from witcert_core.meter.cells import CellBatch
    from witcert_core.policy.gates import CellStatus

LAYER_NOT_METERED = "layer excluded from metering"
LAW_WITHDRAWN = "measured under the probabilistic tier, which does not hold for this request"
PARTLY_MEASURED = "row measured in some layers only"
EXACT = "exact"
"""In the place of a worst bound: whatever these cells read was exact."""
_NOT_MEASURED = -1.0


@dataclass(frozen=True)
class WorstCell:
    """The cell with the highest meter; the first one of equals."""

    meter: float
    layer: int
    head: int
    step: int
    position: int
    form: int


@dataclass(frozen=True)
class WorstMismatch:
    """The output that is furthest from attention over what is stored; excess: beyond rounding, of the output's norm."""

    excess: float
    layer: int
    head: int
    step: int
    position: int


@dataclass
class AuditCounts:
    """True total variations against their bounds, and the engine's outputs against attention over what is stored.

    gap: meter minus true value, how loose the meter was.
    """

    cells: int = 0
    violations: int = 0
    outputs: int = 0
    mismatches: int = 0
    worst_mismatch: WorstMismatch | None = None
    tv_max: float | None = None
    gap_max: float | None = None
    gap_sum: float = 0.0

    def add(self, meter: Tensor, tv: Tensor, floor: Tensor) -> tuple[int, int]:
        """Count [A] audited cells; returns how many there were and how many broke their bound, above or below."""
        gap = meter - tv
        violations = int(((tv > meter) | (tv < floor)).sum())
        self.cells += tv.numel()
        self.violations += violations
        self.tv_max = max(float(tv.max()), self.tv_max if self.tv_max is not None else -math.inf)
        self.gap_max = max(float(gap.max()), self.gap_max if self.gap_max is not None else -math.inf)
        self.gap_sum += float(gap.sum())
        return tv.numel(), violations

    def add_outputs(self, excess: Tensor, norm: Tensor, layer: int, step: int, position: int) -> tuple[int, int]:
        """Count the outputs of [H] cells that were compared (the others NaN); how many there were and did not match."""
        known = ~excess.isnan()
        wrong = excess > 0
        outputs, mismatches = int(known.sum()), int(wrong.sum())
        self.outputs += outputs
        self.mismatches += mismatches
        if mismatches:
            relative = torch.where(wrong, excess / norm, 0.0).nan_to_num(nan=math.inf)
            head = int(relative.argmax())
            if self.worst_mismatch is None or float(relative[head]) > self.worst_mismatch.excess:
                self.worst_mismatch = WorstMismatch(float(relative[head]), layer, head, step, position)
        return outputs, mismatches

    def as_dict(self, head_offset: int = 0) -> dict[str, Any]:
        worst = self.worst_mismatch
        return {
            "cells": self.cells,
            "violations": self.violations,
            "outputs": self.outputs,
            "mismatches": self.mismatches,
            "worst_mismatch": None
            if worst is None
            else {
                "excess": json_number(worst.excess),
                "layer": worst.layer,
                "q_head": head_offset + worst.head,
                "step": worst.step,
                "position": worst.position,
            },
            "tv_max": self.tv_max,
            "gap_max": self.gap_max,
            "gap_mean": self.gap_sum / self.cells if self.cells else None,
        }


@dataclass
class DeterministicCounts:
    """The deterministic bounds of cells whose meter used the dither law."""

    cells: int = 0
    tv_certified_cells: int = 0
    worst: float = 0.0

    def as_dict(self) -> dict[str, Any] | None:
        if not self.cells:
            return None
        return {"cells": self.cells, "tv_certified_cells": self.tv_certified_cells, "worst": self.worst}


@dataclass(frozen=True)
class Observed:
    """What one row added: the meters [MEASURED] float64, on the host, of its cells that read something quantized, and
    how many cells were what. tokens: read by all its cells, quantized and exact ones. worst_head: of its highest meter.
    """

    meter: Tensor
    worst_head: int
    exact: int
    tokens_quantized: int
    tokens_exact: int
    tv_certified: int
    damaged: int
    audited: int
    violations: int
    outputs: int
    mismatches: int
    new_row: bool


@dataclass
class RequestState:
    """The counts of one request. A cell that read nothing quantized is exact: it is counted, and audited, but no bound
    of it is, for there is nothing that a bound could be good for. A cell whose output did not match counts as measured
    with a meter of 1, whatever it read: its bound is about other weights than those served.
    """

    num_layers: int
    num_heads: int
    num_forms: int
    rows_metered: int = 0
    rows_rejected: int = 0
    unknown_rows: int = 0
    cells_measured: int = 0
    cells_exact: int = 0
    tokens_quantized: int = 0
    tokens_exact: int = 0
    tv_certified_cells: int = 0
    damaged_cells: int = 0
    floor_max: float = 0.0
    worst: WorstCell | None = None
    log_a_max: float = -math.inf
    out_bound_rel_max: float = 0.0
    out_unbounded_layers: set[int] = field(default_factory=set)
    delta_spent: float = 0.0
    without_law: str = ""
    repaired_blocks: int = 0
    repaired_bytes: int = 0
    unknown_reasons: Counter[str] = field(default_factory=Counter)
    lost_cells: Counter[str] = field(default_factory=Counter)
    tier_cells: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[CellStatus] = field(default_factory=Counter)
    audit: AuditCounts = field(default_factory=AuditCounts)
    beside: DeterministicCounts = field(default_factory=DeterministicCounts)
    sample: SampleCounts = field(default_factory=SampleCounts)

    def __post_init__(self) -> None:
        self.forms = torch.zeros(self.num_forms, dtype=torch.int64)
        self._worst = torch.full((self.num_layers, self.num_heads), _NOT_MEASURED, dtype=torch.float64)
        self._worst_form = torch.zeros(self.num_layers, self.num_heads, dtype=torch.int64)
        self._read_exactly = torch.zeros(self.num_layers, self.num_heads, dtype=torch.bool)
        self._exact_by_layer = [0] * self.num_layers
        self._certified_by_layer = [0] * self.num_layers
        self._rows_by_layer = [0] * self.num_layers
        self._lost_by_layer = [0] * self.num_layers
        self._log_a_by_layer = [0.0] * self.num_layers

    def observe(self, cells: CellBatch, row: int, layer: int, step: int, position: int, tau: float) -> Observed:
        """Count row `row` of a batch of layer `layer`.

        Every layer sees the same rows, so the request has as many rows as the layer that saw most.
        """
        wrong = _mismatched(cells, row)
        every = _meters(cells, row)
        floors = cells.floor[row].detach().to("cpu", torch.float64)
        audited, violations = self._audit(every, floors, cells, row)
        outputs, mismatches = self._audit_outputs(cells, row, layer, step, position)
        every, floors = every.masked_fill(wrong, 1.0), floors.masked_fill(wrong, 0.0)
        quantized = cells.num_quantized[row].to("cpu")
        read = (quantized > 0) | wrong
        exact = every.numel() - int(read.sum())
        tokens = int(quantized.sum())
        tokens_exact = int(cells.num_visible[row]) * every.numel() - tokens
        self.cells_exact += exact
        self.tokens_quantized += tokens
        self.tokens_exact += tokens_exact
        self._exact_by_layer[layer] += exact
        self._read_exactly[layer] |= ~read
        meter, floor = every[read], floors[read]
        certified, damaged = int((meter <= tau).sum()), int((floor > tau).sum())
        worst_head = int(torch.where(read, every, _NOT_MEASURED).argmax())
        if meter.numel():
            self._observe_bounds(cells, row, layer, (worst_head, step, position), every, read)
            self.floor_max = max(self.floor_max, float(floor.max()))
        self.tv_certified_cells += certified
        self.damaged_cells += damaged
        self._certified_by_layer[layer] += certified
        delta_loc = float(cells.delta_loc[row])
        self.tier_cells["probabilistic" if delta_loc > 0 else "deterministic"] += meter.numel()
        if delta_loc > 0:
            self._spend(delta_loc, every.numel())
        self._rows_by_layer[layer] += 1
        new_row = self._count_row(layer)
        audit = audited, violations, outputs, mismatches
        return Observed(meter, worst_head, exact, tokens, tokens_exact, certified, damaged, *audit, new_row)

    def _observe_bounds(
        self, cells: CellBatch, row: int, layer: int, worst: tuple[int, int, int], meter: Tensor, read: Tensor
    ) -> None:
        """Count what bounds say of the cells `read` [H] bool; worst: head of the highest meter, step and position."""
        form = cells.form[row].cpu()
        self.cells_measured += int(read.sum())
        higher = read & (meter > self._worst[layer])
        self._worst[layer] = torch.where(higher, meter, self._worst[layer])
        self._worst_form[layer] = torch.where(higher, form, self._worst_form[layer])
        self.forms += torch.bincount(form[read], minlength=self.num_forms)
        head, step, position = worst
        highest = float(meter[head])
        if self.worst is None or highest > self.worst.meter:
            self.worst = WorstCell(highest, layer, head, step, position, int(form[head]))
        log_a = _unbounded(cells.log_a[row])[read]
        self.log_a_max = max(self.log_a_max, float(log_a.max()))
        self._log_a_by_layer[layer] += float(log_a.clamp(max=MOST_LOG_A).sum())
        largest = _largest_relative_output_bound(cells, row, read)
        self.out_bound_rel_max = max(self.out_bound_rel_max, largest)
        if math.isinf(largest):
            self.out_unbounded_layers.add(layer)

    def _count_row(self, layer: int) -> bool:
        """Whether no other layer has seen, or lost, as many rows as `layer` now has."""
        new_row = self._rows_by_layer[layer] + self._lost_by_layer[layer] > self.rows_metered
        self.rows_metered += new_row
        return new_row

    def _spend(self, delta_loc: float, cells: int) -> None:
        self.delta_spent = math.nextafter(self.delta_spent + delta_loc * cells, math.inf)

    def count_rejected(self, layers: Sequence[CellBatch], row: int) -> int:
        """A metered row of a draft that was wrong: what it spent, and its violations, which it returns."""
        self.rows_rejected += 1
        violations = 0
        for cells in layers:
            if (delta_loc := float(cells.delta_loc[row])) > 0:
                self._spend(delta_loc, self.num_heads)
            if cells.tv_audit is not None:  # NaN where it was not audited
                tv, floor = (x[row].to("cpu", torch.float64) for x in (cells.tv_audit, cells.floor))
                violations += int(((tv > _meters(cells, row)) | (tv < floor)).sum())
        self.audit.violations += violations
        return violations

    def count_lost(self, layer: int, reason: str) -> None:
        """A row of which `layer` was to be measured and was not, though other layers were."""
        self.lost_cells[reason] += self.num_heads
        self._lost_by_layer[layer] += 1
        self._count_row(layer)

    def observe_beside(self, cells: CellBatch, row: int, tau: float, beside: CellBatch) -> None:
        """Count the deterministic bounds of a row whose meter, that of `beside`, used the dither law."""
        wrong = _mismatched(beside, row)
        meter = _meters(cells, row)[(cells.num_quantized[row].to("cpu") > 0) & ~wrong]
        if meter.numel():
            self.beside.cells += meter.numel()
            self.beside.tv_certified_cells += int((meter <= tau).sum())
            self.beside.worst = max(self.beside.worst, float(meter.max()))

    def without_dither(self, why: str) -> RequestState:
        """The counts of a request of which nothing is claimed under the dither law from now on.

        Rows whose cells were counted under it are unknown then; what audits found, was repaired and spent stays.
        """
        if not self.tier_cells["probabilistic"]:
            self.without_law = why
            return self
        left = RequestState(self.num_layers, self.num_heads, self.num_forms, without_law=why)
        left.unknown_rows = self.unknown_rows + self.rows_metered
        left.unknown_reasons = self.unknown_reasons + Counter({LAW_WITHDRAWN: self.rows_metered})
        left.rows_rejected = self.rows_rejected
        left.audit, left.sample, left.delta_spent = self.audit, self.sample, self.delta_spent
        left.repaired_blocks, left.repaired_bytes = self.repaired_blocks, self.repaired_bytes
        return left

    def count_unknown(self, rows: int, reason: str) -> None:
        self.unknown_rows += rows
        self.unknown_reasons[reason] += rows

    def worst_by_layer_head(self) -> list[list[float | str | None]]:
        """[L][H], `EXACT` where cells read nothing quantized only, None where nothing was measured."""
        found = zip(self._worst.tolist(), self._read_exactly.tolist(), strict=True)
        return [
            [worst if worst != _NOT_MEASURED else EXACT if exact else None for worst, exact in zip(*layer, strict=True)]
            for layer in found
        ]

    def _cells_of(self, layer: int) -> int:
        """Measured cells of a layer."""
        return self._rows_by_layer[layer] * self.num_heads - self._exact_by_layer[layer]

    def by_layer(self, form_names: Sequence[str]) -> list[dict[str, Any]]:
        """[L] counts; form: what decided the layer's worst cell, None where nothing was measured."""
        heads = self._worst.argmax(dim=1).tolist()
        found = []
        for layer, exact in enumerate(self._exact_by_layer):
            cells = self._cells_of(layer)
            found.append(
                {
                    "layer": layer,
                    "cells": cells,
                    "cells_exact": exact,
                    "tv_certified_cells": 0 if self.void else self._certified_by_layer[layer],
                    "form": form_names[int(self._worst_form[layer, heads[layer]])] if cells else None,
                }
            )
        return found

    @property
    def risk(self) -> float | None:
        """An estimate, not a bound: see `report.risk`. 0 where nothing quantized was read, None of nothing measured."""
        if not self.cells_measured:
            return 0.0 if self.cells_exact else None
        cells = [self._cells_of(layer) for layer in range(self.num_layers)]
        return estimate(of_last_layers(self._log_a_by_layer, cells))

    @property
    def void(self) -> bool:
        """Whether some output was no attention over what is stored: then nothing of the request is certified."""
        return self.audit.mismatches > 0

    def _audit_outputs(self, cells: CellBatch, row: int, layer: int, step: int, position: int) -> tuple[int, int]:
        if cells.excess is None:
            return 0, 0
        excess, norm = (x[row].to("cpu", torch.float64) for x in (cells.excess, cells.out_norm))
        return self.audit.add_outputs(excess, norm, layer, step, position)

    def _audit(self, meter: Tensor, floor: Tensor, cells: CellBatch, row: int) -> tuple[int, int]:
        if cells.tv_audit is None:
            return 0, 0
        tv = cells.tv_audit[row].to("cpu", torch.float64)
        audited = ~tv.isnan()
        if not bool(audited.any()):
            return 0, 0
        return self.audit.add(meter[audited], tv[audited], floor[audited])


def _mismatched(cells: CellBatch, row: int) -> Tensor:
    """Bool [H] on the host: cells whose output was compared and is not that of the weights that were measured."""
    if cells.excess is None:
        return torch.zeros(cells.meter.shape[1], dtype=torch.bool)
    return cells.excess[row].to("cpu") > 0


def _meters(cells: CellBatch, row: int) -> Tensor:
    """[H] float64 on the host; a bound that is not a number bounds nothing."""
    return cells.meter[row].detach().to("cpu", torch.float64).nan_to_num(nan=1.0)


def _unbounded(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.float64).nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)


def _largest_relative_output_bound(cells: CellBatch, row: int, read: Tensor) -> float:
    bound, norm = _unbounded(cells.out_bound[row]), cells.out_norm[row].to("cpu", torch.float64)
    bound = bound.masked_fill(_mismatched(cells, row), math.inf)
    relative = torch.where(bound == 0, torch.zeros_like(bound), _unbounded(bound / norm))
    largest = float(relative[read].max())
    return math.nextafter(largest, math.inf) if largest > 0 else 0.0
