"""The ledger: what was measured, and what was not, for every request being served.

Shapes: L layers, H query heads of this rank. A request costs O(L*H) memory, whatever its length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from witcert_core.cache.schedule import QuantizeSchedule
from witcert_core.errors import ReportError
from witcert_core.meter.bounds import FORM_NAMES
from witcert_core.policy.gates import CellStatus
from witcert_core.policy.model import Policy
from witcert_core.policy.plugins import CellEvent, cell_observers, plugin_manager, report_observers
from witcert_core.probes.board import ProbeBoard
from witcert_core.quantizers.base import Tier
from witcert_core.report.claims import VOID, claim
from witcert_core.report.counts import LAW_WITHDRAWN, LAYER_NOT_METERED, PARTLY_MEASURED, Observed, RequestState
from witcert_core.report.jsonl import JsonlWriter
from witcert_core.report.prometheus import Metrics
from witcert_core.report.records import cell_records, json_number, unknown_record
from witcert_core.report.sample import BoundedBySketches, Compared

if TYPE_CHECKING:
    from witcert_core.meter.cells import CellBatch
    from witcert_core.report.jsonl import JsonlWriter
    from witcert_core.report.prometheus import Metrics

REQUEST_SCHEMA = "witcert.request/1"


class RequestLedger:
    """Counts per request; one per engine process.

    num_layers: layers of the model, so that layer ids run from 0 to num_layers - 1.
    num_qo_heads: query heads of this rank; the first one has the global id head_offset.
    layers_excluded: layer -> why its cells are not measured although they exist; they count as unknown.
    layers_exempt: layer -> why it has no cell at all (no attention, its own engine path); not counted.

    Example:
        >>> import witcert_core as wc
        >>> policy = wc.Policy(version=1, quantizer={"name": "int4_token_group"})
        >>> ledger = wc.RequestLedger(policy, engine="mine", num_layers=2, num_qo_heads=4)
        >>> ledger.count_unknown("request-1", 3, "stride")
        >>> ledger.finish("request-1", "stop")["cells_unknown"]
        24
    """

    def __init__(
        self,
        policy: Policy,
        engine: str,
        num_layers: int,
        num_qo_heads: int,
        *,
        layers_excluded: Mapping[int, str] | None = None,
        layers_exempt: Mapping[int, str] | None = None,
        head_offset: int = 0,
        jsonl: JsonlWriter | None = None,
        metrics: Metrics | None = None,
        on_cell: tuple[Callable[[CellEvent], None], ...] | None = None,
        on_report: tuple[Callable[[dict[str, Any]], None], ...] | None = None,
    ) -> None:
        self._policy = policy
        self._engine = engine
        self._num_layers = num_layers
        self._num_heads = num_qo_heads
        self._head_offset = head_offset
        self._waits_for = QuantizeSchedule.of(policy.resolved_quantizer).waits_for() or None
        self._excluded = dict(layers_excluded or {})
        self._exempt = dict(layers_exempt or {})
        for layer in (*self._excluded, *self._exempt):
            self._check_layer(layer)
        counted = [layer for layer in range(num_layers) if layer not in self._exempt]
        self._cells_per_row = len(counted) * num_qo_heads
        self._excluded_cells_per_row = len(set(counted) & set(self._excluded)) * num_qo_heads
        self._jsonl = jsonl
        self._metrics = metrics
        if metrics is not None:
            metrics.announce(policy.quantizer.name)
        self._on_cell = cell_observers(plugin_manager()) if on_cell is None else on_cell
        self._on_report = report_observers(plugin_manager()) if on_report is None else on_report
        self._requests: dict[str, RequestState] = {}
        self.probes = ProbeBoard(num_qo_heads, head_offset)
        self.counted_layers = {layer: LAYER_NOT_METERED if layer in self._excluded else "" for layer in counted}
        """Layers that have cells, each with why these are never measured, or ''."""

    def observe(
        self,
        request_id: str,
        layer: int,
        step: int,
        position: int,
        cells: CellBatch,
        row: int,
        *,
        deterministic_cells: CellBatch | None = None,
        repaired_blocks: int = 0,
    ) -> None:
        """Count row `row` of a measured batch: the H cells of one query row in one layer.

        step: the row's 1-based number in its request. deterministic_cells: the same rows under deterministic radii,
        where `cells` used the dither law.
        """
        self._check_layer(layer)
        heads = cells.meter.shape[1]
        if heads != self._num_heads:
            raise ReportError(f"layer {layer}: the batch has {heads} query heads, the ledger {self._num_heads}")
        state = self._state(request_id)
        if state.without_law and float(cells.delta_loc[row]) > 0:
            if deterministic_cells is None:
                state.count_lost(layer, LAW_WITHDRAWN)
                return
            cells, deterministic_cells = deterministic_cells, None
        seen = state.observe(cells, row, layer, step, position, self._policy.gate.tau)
        if deterministic_cells is not None:
            state.observe_beside(deterministic_cells, row, self._policy.gate.tau, cells)
        if self._metrics is not None:
            self._metrics.cells_measured(self._policy.quantizer.name, seen)
        if self._on_cell or (self._jsonl is not None and self._policy.report.cells != "none"):
            tier: Tier = "probabilistic" if float(cells.delta_loc[row]) > 0 else "deterministic"
            offset = self._head_offset
            event = CellEvent(request_id, layer, step, position, tier, offset, cells, row, repaired_blocks)
            self._emit(event, seen)

    def compare(self, request_id: str, cells: CellBatch, row: int, tv: Tensor, out: Tensor) -> None:
        """Count row `row` of a measured batch beside its true TV [H] and output error ``||o - o~||`` [H]."""
        found = Compared.of(cells, row, tv, out)
        self._state(request_id).sample.add(found)
        if self._metrics is not None:
            self._metrics.cells_compared(self._policy.quantizer.name, found)

    def sketch(self, request_id: str, cells: CellBatch, row: int, bound: Tensor, true: Tensor | None) -> None:
        """Count row `row` of a measured batch with bounds on TV from sketches [H]; true [H]: TV itself, if known."""
        found = BoundedBySketches.of(cells, row, bound, true)
        self._state(request_id).sample.add_sketched(found)
        if self._metrics is not None:
            self._metrics.cells_sketched(self._policy.quantizer.name, found)

    def count_not_sketched(self, request_id: str, rows: int, reason: str) -> None:
        """Count metered rows of a request drawn for sketches that could not be bounded by them."""
        self._state(request_id).sample.sketches.missed[reason] += rows
        if self._metrics is not None:
            self._metrics.rows_not_sketched(rows, reason)

    def count_not_audited(self, request_id: str, rows: int, reason: str) -> None:
        """Count metered rows of a sampled request that could not be compared."""
        self._state(request_id).sample.missed[reason] += rows
        if self._metrics is not None:
            self._metrics.rows_not_audited(rows, reason)

    def count_unknown(self, request_id: str, rows: int, reason: str) -> None:
        """Count query rows of which no cell was measured."""
        if rows < 0:
            raise ReportError(f"request {request_id!r}: {rows} unmeasured rows; expected 0 or more")
        if rows == 0:
            return
        self._state(request_id).count_unknown(rows, reason)
        if self._metrics is not None:
            self._metrics.rows_unknown(rows)
            self._metrics.cells_unknown(self._policy.quantizer.name, rows * self._cells_per_row)
        if self._jsonl is not None and self._policy.report.cells != "none":
            self._jsonl.write(unknown_record(request_id, rows, reason))

    def count_rejected(self, request_id: str, layers: Sequence[CellBatch], row: int) -> None:
        """Count row `row` of the batches of all layers, of a draft that was wrong: of no text that is served, but its
        bounds could have failed."""
        violations = self._state(request_id).count_rejected(layers, row)
        if self._metrics is not None:
            self._metrics.row_rejected(self._policy.quantizer.name, violations)

    def count_lost(self, request_id: str, layer: int, reason: str) -> None:
        """Count the cells of one row in `layer` that were to be measured and were not, though other layers were."""
        self._check_layer(layer)
        self._state(request_id).count_lost(layer, reason)

    def claim_no_law(self, request_id: str, why: str) -> None:
        """Claim nothing of this request under the dither law: only deterministic bounds count as certified."""
        state = self._state(request_id)
        if not state.without_law:
            self._requests[request_id] = state.without_dither(why)

    def claims_no_law(self, request_id: str) -> bool:
        """Whether only deterministic bounds are claimed of a request, though others have the dither law."""
        return bool(self._state(request_id).without_law)

    def count_probed(self, *, only: bool, seconds: float) -> None:
        """Count what a row of probes cost: whether only they asked for it, and the time their answers took."""
        if self._metrics is not None:
            self._metrics.row_probed(only, seconds)

    def count_repair(self, request_id: str, blocks: int, nbytes: int) -> None:
        """Count exact blocks that the gate wrote back, and the bytes it moved for them."""
        state = self._state(request_id)
        state.repaired_blocks += blocks
        state.repaired_bytes += nbytes

    def count_verdict(self, request_id: str, status: Tensor) -> None:
        """Count what a gate said of the cells it was asked about: int64 [...] of gates.CellStatus."""
        verdicts = self._state(request_id).verdicts
        for code, count in enumerate(torch.bincount(status.flatten().cpu(), minlength=len(CellStatus)).tolist()):
            verdicts[CellStatus(code)] += count

    def summary(self, request_id: str) -> dict[str, Any]:
        """The request so far (schema witcert.request/1); a request never seen has nothing measured."""
        state = self._requests.get(request_id) or self._new_state()
        return self._summarize(request_id, state, finish_reason=None)

    def finish(self, request_id: str, reason: str) -> dict[str, Any]:
        """The final summary, also sent to every report; the request is forgotten."""
        state = self._requests.pop(request_id, None) or self._new_state()
        summary = self._summarize(request_id, state, finish_reason=reason)
        if self._metrics is not None:
            said = state.unknown_rows * self._cells_per_row
            name, worst = self._policy.quantizer.name, summary["worst"]
            self._metrics.cells_unknown(name, summary["cells_unknown"] - said)
            self._metrics.request_finished(name, None if worst is None else worst["meter"])
        if self._jsonl is not None:
            self._jsonl.write(summary)
        for observer in self._on_report:
            observer(deepcopy(summary))  # what a plugin does to it must not change the report
        return summary

    def forget(self, request_id: str) -> None:
        """Drop a request that will not be reported."""
        self._requests.pop(request_id, None)

    def _emit(self, event: CellEvent, seen: Observed) -> None:
        for observer in self._on_cell:
            observer(event)
        if self._jsonl is None or self._policy.report.cells == "none":
            return
        every = self._policy.report.cells == "all"
        for record in cell_records(event, range(self._num_heads) if every else [seen.worst_head], FORM_NAMES):
            self._jsonl.write(record)

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self._num_layers:
            raise ReportError(f"layer {layer} is not one of the {self._num_layers} layers of this ledger")

    def _new_state(self) -> RequestState:
        return RequestState(self._num_layers, self._num_heads, len(FORM_NAMES))

    def _state(self, request_id: str) -> RequestState:
        state = self._requests.get(request_id)
        if state is None:
            state = self._requests[request_id] = self._new_state()
        return state

    def _unknown_cells(self, state: RequestState) -> dict[str, int]:
        """Cells not measured, by reason; together with measured and exact ones, every cell of every row seen."""
        reasons = {reason: rows * self._cells_per_row for reason, rows in state.unknown_reasons.items()}
        excluded = state.rows_metered * self._excluded_cells_per_row
        lost = state.lost_cells
        counted = state.cells_measured + state.cells_exact
        partly = state.rows_metered * self._cells_per_row - counted - excluded - lost.total()
        for reason, count in ((LAYER_NOT_METERED, excluded), *lost.items(), (PARTLY_MEASURED, partly)):
            if count > 0:
                reasons[reason] = reasons.get(reason, 0) + count
        return reasons

    def _summarize(self, request_id: str, state: RequestState, finish_reason: str | None) -> dict[str, Any]:
        policy = self._policy
        unknown = self._unknown_cells(state)
        measured = state.cells_measured
        worst = state.worst
        dither = policy.tier == "probabilistic" and not state.without_law
        certified = 0 if state.void else state.tv_certified_cells
        beside = state.beside.as_dict()
        if beside is not None and state.void:
            beside["tv_certified_cells"] = 0
        return {
            "schema": REQUEST_SCHEMA,
            "request_id": request_id,
            "engine": self._engine,
            "quantizer": policy.quantizer.name,
            "tier": "probabilistic" if dither else "deterministic",
            "claim": VOID
            if state.void
            else claim(
                policy.tier,
                policy.meter.delta,
                state.beside.cells,
                state.tier_cells["deterministic"],
                state.without_law,
            ),
            "tau": policy.gate.tau,
            "rows_seen": state.rows_metered + state.unknown_rows,
            "rows_metered": state.rows_metered,
            "rows_rejected": state.rows_rejected,
            "cells_measured": measured,
            "cells_exact": state.cells_exact,
            "cells_unknown": sum(unknown.values()),
            "unknown_reasons": unknown,
            "tokens_read": {"quantized": state.tokens_quantized, "exact": state.tokens_exact},
            "waits_for": self._waits_for,
            "tv_certified_cells": certified,
            "tv_certified_share": certified / measured if measured else None,
            "damaged_cells": state.damaged_cells,
            "floor_max": state.floor_max if measured else None,
            "worst": None
            if worst is None
            else {
                "meter": worst.meter,
                "layer": worst.layer,
                "q_head": self._head_offset + worst.head,
                "step": worst.step,
                "position": worst.position,
                "form": FORM_NAMES[worst.form],
            },
            "worst_by_layer_head": state.worst_by_layer_head(),
            "by_layer": state.by_layer(FORM_NAMES),
            "forms": {name: count for name, count in zip(FORM_NAMES, state.forms.tolist(), strict=True) if count},
            "log_a_max": None if not measured else json_number(state.log_a_max),
            "risk": state.risk,
            "out_bound_rel_max": None if not measured else json_number(state.out_bound_rel_max),
            "out_unbounded_layers": sorted(state.out_unbounded_layers),
            "tier_cells": dict(state.tier_cells),
            "deterministic_beside": beside,
            "delta": {"request": policy.meter.delta if dither else 0.0, "spent": state.delta_spent},
            "audit": state.audit.as_dict(self._head_offset),
            "sample": state.sample.as_dict(),
            "gate": {
                "kind": policy.gate.kind,
                "repaired_blocks": state.repaired_blocks,
                "bytes": state.repaired_bytes,
                "target": policy.gate.target,
                "within_target": state.verdicts[CellStatus.WITHIN_TARGET],
                "above_target": state.verdicts[CellStatus.ABOVE_TARGET],
                "ranked": state.verdicts[CellStatus.RANKED],
                "exact": state.verdicts[CellStatus.EXACT],
            },
            "layers_excluded": {str(layer): why for layer, why in sorted((self._excluded | self._exempt).items())},
            "records_dropped": 0 if self._jsonl is None else self._jsonl.dropped,
            "finish_reason": finish_reason,
        }


def make_ledger(
    engine: str,
    policy: Policy,
    layers: Sequence[int],
    num_qo_heads: int,
    metrics: Metrics | None,
    without_cache: Sequence[int] = (),
) -> RequestLedger:
    """A ledger for a model with these attention layers and `num_qo_heads` query heads on all ranks together.

    engine: its name in reports. without_cache: the model's other layers. Opens `report.jsonl` (ReportError if it cannot
    be written).
    """
    metered = frozenset(policy.meter.layers_of(layers))
    return RequestLedger(
        policy,
        engine=engine,
        num_layers=1 + max(*layers, *without_cache, -1),
        num_qo_heads=num_qo_heads,
        layers_excluded={layer: "left out by meter.layers" for layer in layers if layer not in metered},
        layers_exempt=dict.fromkeys(without_cache, "keeps no keys and values"),
        jsonl=JsonlWriter(policy.report.jsonl) if policy.report.jsonl else None,
        metrics=metrics,
    )


def without_cache(layers: Sequence[int], num_hidden_layers: int) -> tuple[int, ...]:
    """The layers of a model of `num_hidden_layers` layers, or of as many as `layers` name, that are not among these."""
    every = max(num_hidden_layers, *(layer + 1 for layer in layers))
    return tuple(sorted(set(range(every)) - set(layers)))
