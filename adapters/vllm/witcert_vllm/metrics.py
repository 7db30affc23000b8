"""Prometheus across processes: the scheduler counts, the API server shows.

vLLM's engine core has no metrics registry; what it counts travels with the scheduler's statistics
(`KVConnectorStats`, a plain dict) and is counted again where `/metrics` is served.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from witcert_core.serving import BoundedBySketches, Compared, Metrics, Observed
from witcert_vllm import http


class CountedStats(KVConnectorStats):
    """`data`: {"events": calls of `Metrics`, "summaries": finished requests}; each step has its own."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key, more in other.data.items():
            self.data.setdefault(key, []).extend(more)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Nothing for the periodic log line: `/metrics` has it all."""
        return {}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class Recorder(Metrics):
    """`Metrics` that keeps its calls for another process."""

    def __init__(self) -> None:
        self.events: list[list[Any]] = []

    def announce(self, quantizer: str) -> None:
        self.events.append(["announce", quantizer])

    def cells_measured(self, quantizer: str, seen: Observed) -> None:
        values = {field.name: getattr(seen, field.name) for field in fields(seen)}
        self.events.append(["cells_measured", quantizer, {**values, "meter": seen.meter.tolist()}])

    def cells_compared(self, quantizer: str, found: Compared) -> None:
        self.events.append(["cells_compared", quantizer, _listed(found)])

    def cells_sketched(self, quantizer: str, found: BoundedBySketches) -> None:
        self.events.append(["cells_sketched", quantizer, _listed(found)])

    def rows_not_sketched(self, rows: int, reason: str) -> None:
        self.events.append(["rows_not_sketched", rows, reason])

    def rows_not_audited(self, rows: int, reason: str) -> None:
        self.events.append(["rows_not_audited", rows, reason])

    def row_probed(self, only: bool, seconds: float) -> None:
        self.events.append(["row_probed", only, seconds])

    def rows_unknown(self, rows: int) -> None:
        self.events.append(["rows_unknown", rows])

    def row_rejected(self, quantizer: str, violations: int) -> None:
        self.events.append(["row_rejected", quantizer, violations])

    def cells_unknown(self, quantizer: str, cells: int) -> None:
        self.events.append(["cells_unknown", quantizer, cells])

    def request_finished(self, quantizer: str, worst_meter: float | None) -> None:
        self.events.append(["request_finished", quantizer, worst_meter])

    def take(self) -> list[list[Any]]:
        """The calls since the last time."""
        events, self.events = self.events, []
        return events


def _listed(found: Compared | BoundedBySketches) -> dict[str, Any]:
    """Its fields, as a message can carry them; `_found` makes it of them again."""
    values = {field.name: getattr(found, field.name) for field in fields(found)}
    return {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in values.items()}


def _found(values: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.tensor(x, dtype=torch.float64) if isinstance(x, list) else x for name, x in values.items()}


def replay(metrics: Metrics, events: list[list[Any]]) -> None:
    """Do the recorded calls."""
    for name, *args in events:
        if name == "cells_measured":
            quantizer, values = args
            meter = torch.tensor(values["meter"], dtype=torch.float64)
            metrics.cells_measured(quantizer, Observed(**{**values, "meter": meter}))
        elif name == "cells_compared":
            quantizer, values = args
            metrics.cells_compared(quantizer, Compared(**_found(values)))
        elif name == "cells_sketched":
            quantizer, values = args
            metrics.cells_sketched(quantizer, BoundedBySketches(**_found(values)))
        else:
            getattr(metrics, name)(*args)


_metrics: Metrics | None = None


def process_metrics() -> Metrics:
    """The metrics of this process; prometheus_client refuses the same names twice."""
    global _metrics
    if _metrics is None:
        _metrics = Metrics()
    return _metrics


class Shown(KVConnectorPromMetrics):
    """The API server's end."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        if events := transfer_stats_data.get("events"):
            replay(process_metrics(), events)
        for summary in transfer_stats_data.get("summaries", []):
            http.STATE.summaries.keep(summary["request_id"], summary)
            http.STATE.summaries.totals.add(summary)  # here alone: answers bring it a second time
