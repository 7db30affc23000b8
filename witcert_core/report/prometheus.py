"""Prometheus metrics, created on first use; they also work in prometheus_client's multiprocess mode.

prometheus_client decides on that mode when it is imported, so it is imported as late as possible: after an
engine has set PROMETHEUS_MULTIPROC_DIR.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from witcert_core.report.counts import Observed
from witcert_core.report.sample import BoundedBySketches, Compared

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Histogram

METER_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0)
RATIO_BUCKETS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0)


class Metrics:
    """The metrics of one process. One per registry: a second one would register the same names twice.

    registry: where to register; None is prometheus_client's default. Labels are the quantizer's name and a
    status: request ids, layers and heads never become labels.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        from prometheus_client import REGISTRY, Counter, Histogram

        target = REGISTRY if registry is None else registry
        self._edges = torch.tensor(METER_BUCKETS, dtype=torch.float64)
        self._ratio_edges = torch.tensor(RATIO_BUCKETS, dtype=torch.float64)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=target)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = METER_BUCKETS) -> Histogram:
            return Histogram(name, text, ("quantizer",), buckets=buckets, registry=target)

        self._cell_meter = histogram(
            "witcert_cell_meter", "Bound on the total variation of attention weights, per measured cell"
        )
        self._worst_meter = histogram(
            "witcert_request_worst_meter", "Worst bound of a finished request in which something was measured"
        )
        self._cells = counter(
            "witcert_cells",
            "Cells: measured, exact (they read nothing quantized) or unknown",
            "status",
            "quantizer",
        )
        self._tokens = counter(
            "witcert_tokens_read", "Tokens read by cells, once for each cell: quantized or exact", "status", "quantizer"
        )
        self._certified = counter(
            "witcert_cells_tv_certified", "Measured cells with a bound on TV of at most gate.tau", "quantizer"
        )
        self._damaged = counter(
            "witcert_cells_damaged", "Measured cells whose total variation is certainly above gate.tau", "quantizer"
        )
        self._rows = counter("witcert_rows", "Query rows, metered or unknown, and those of wrong drafts", "status")
        self._audited = counter("witcert_audited_cells", "Cells compared with their true value", "quantizer")
        self._violations = counter(
            "witcert_audit_violations", "Audited cells whose true value exceeded the bound", "quantizer"
        )
        self._outputs = counter(
            "witcert_audited_outputs", "Cells whose output was compared with attention over what is stored", "quantizer"
        )
        self._mismatches = counter(
            "witcert_audit_mismatches", "Audited outputs that are not attention over what is stored", "quantizer"
        )
        self._true_tv = histogram("witcert_true_tv", "True total variation of the cells of sampled requests")
        self._true_out = histogram(
            "witcert_true_output_error", "Error of the outputs of sampled requests' cells, relative to their norm"
        )
        self._ratio = histogram(
            "witcert_bound_over_true_tv", "Bound over true total variation of sampled requests' cells", RATIO_BUCKETS
        )
        self._out_ratio = histogram(
            "witcert_bound_over_true_output_error", "Bound over true output error of the same cells", RATIO_BUCKETS
        )
        self._not_audited = counter(
            "witcert_rows_not_audited", "Metered rows of sampled requests that could not be compared", "reason"
        )
        self._sketched = histogram("witcert_sketched_bound", "Bound on TV from sketches of requests drawn for them")
        self._sketched_ratio = histogram(
            "witcert_sketched_bound_over_true_tv",
            "The same over the true total variation of cells compared as well",
            RATIO_BUCKETS,
        )
        self._not_sketched = counter(
            "witcert_rows_not_sketched", "Metered rows of requests drawn for sketches that lack some", "reason"
        )
        self._probed = counter(
            "witcert_rows_probed",
            "Rows that probes took: metered because of them alone, or by the policy as well",
            "why",
        )
        self._probe_seconds = counter("witcert_probe_seconds", "Seconds of the host that the answers of probes took")
        self._requests = counter("witcert_requests", "Finished requests", "quantizer")

    def announce(self, quantizer: str) -> None:
        """Show every counter at 0, so that an absent violation is a 0 and not a missing series."""
        audits = self._audited, self._violations, self._outputs, self._mismatches
        for family in (self._certified, self._damaged, *audits, self._requests):
            family.labels(quantizer)
        for status in ("measured", "exact", "unknown"):
            self._cells.labels(status, quantizer)
        for status in ("quantized", "exact"):
            self._tokens.labels(status, quantizer)
        for status in ("metered", "unknown", "rejected"):
            self._rows.labels(status)
        for why in ("probe", "policy"):
            self._probed.labels(why)

    def cells_measured(self, quantizer: str, seen: Observed) -> None:
        """Count one row of one layer."""
        _observe_many(self._cell_meter.labels(quantizer), seen.meter, self._edges)
        self._cells.labels("measured", quantizer).inc(seen.meter.numel())
        self._cells.labels("exact", quantizer).inc(seen.exact)
        self._tokens.labels("quantized", quantizer).inc(seen.tokens_quantized)
        self._tokens.labels("exact", quantizer).inc(seen.tokens_exact)
        self._certified.labels(quantizer).inc(seen.tv_certified)
        self._damaged.labels(quantizer).inc(seen.damaged)
        if seen.new_row:
            self._rows.labels("metered").inc()
        if seen.audited:
            self._audited.labels(quantizer).inc(seen.audited)
            self._violations.labels(quantizer).inc(seen.violations)
        if seen.outputs:
            self._outputs.labels(quantizer).inc(seen.outputs)
            self._mismatches.labels(quantizer).inc(seen.mismatches)

    def cells_compared(self, quantizer: str, found: Compared) -> None:
        """Count the cells of one row of a sampled request in one layer."""
        for family, values, edges in (
            (self._true_tv, found.tv, self._edges),
            (self._true_out, found.out, self._edges),
            (self._ratio, found.tv_ratio, self._ratio_edges),
            (self._out_ratio, found.out_ratio, self._ratio_edges),
        ):
            _observe_many(family.labels(quantizer), values, edges)
        self._audited.labels(quantizer).inc(found.tv.numel())
        self._violations.labels(quantizer).inc(found.violations)

    def rows_not_audited(self, rows: int, reason: str) -> None:
        self._not_audited.labels(reason).inc(rows)

    def cells_sketched(self, quantizer: str, found: BoundedBySketches) -> None:
        """Count the cells of one row, bounded by sketches in one layer."""
        _observe_many(self._sketched.labels(quantizer), found.tv, self._edges)
        _observe_many(self._sketched_ratio.labels(quantizer), found.ratio, self._ratio_edges)
        self._violations.labels(quantizer).inc(found.violations)

    def rows_not_sketched(self, rows: int, reason: str) -> None:
        self._not_sketched.labels(reason).inc(rows)

    def row_probed(self, only: bool, seconds: float) -> None:
        """Count one row that probes took; only: the policy had not asked for it."""
        self._probed.labels("probe" if only else "policy").inc()
        self._probe_seconds.inc(seconds)

    def rows_unknown(self, rows: int) -> None:
        self._rows.labels("unknown").inc(rows)

    def row_rejected(self, quantizer: str, violations: int) -> None:
        self._rows.labels("rejected").inc()
        self._violations.labels(quantizer).inc(violations)

    def cells_unknown(self, quantizer: str, cells: int) -> None:
        self._cells.labels("unknown", quantizer).inc(cells)

    def request_finished(self, quantizer: str, worst_meter: float | None) -> None:
        """Count a finished request; None where nothing was measured, which is no zero in the histogram."""
        self._requests.labels(quantizer).inc()
        if worst_meter is not None:
            self._worst_meter.labels(quantizer).observe(worst_meter)


def _observe_many(histogram: Any, values: Tensor, edges: Tensor) -> None:
    """histogram.observe for every value at once. prometheus_client has no public way to add counts to a
    bucket; a test holds this against observe."""
    counts = torch.bincount(torch.bucketize(values, edges), minlength=len(edges) + 1)
    for bucket, count in zip(histogram._buckets, counts.tolist(), strict=True):
        if count:
            bucket.inc(count)
    histogram._sum.inc(float(values.sum()))
