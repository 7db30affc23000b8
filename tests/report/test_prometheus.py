"""The metrics: equal to what was counted, unknown never a zero, and whole across processes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from report_batches import batch, make_policy

from witcert_core import RequestLedger
from witcert_core.report.prometheus import METER_BUCKETS, Metrics, _observe_many

QUANTIZER = {"quantizer": "int4_token_group"}


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_metrics_follow_the_ledger() -> None:
    registry = CollectorRegistry()
    book = RequestLedger(make_policy(), "sglang", 2, 2, metrics=Metrics(registry), layers_excluded={1: "why"})
    floor = torch.tensor([[0.0, 0.0], [0.5, 0.0]])
    made = batch([[0.1, 0.3], [1.0, 0.2]], tv=[[0.05, 0.4], [math.nan, math.nan]], floor=floor)
    off = batch([[0.1, 0.3]], excess=[[-1.0, 0.5]])
    book.observe("r", 0, 1, 0, made, 0)
    book.observe("r", 0, 2, 1, made, 1)
    other = RequestLedger(make_policy(), "sglang", 1, 2, metrics=Metrics(beside := CollectorRegistry()))
    other.observe("r", 0, 1, 0, off, 0)
    assert value(beside, "witcert_audited_outputs_total", **QUANTIZER) == 2
    assert value(beside, "witcert_audit_mismatches_total", **QUANTIZER) == 1
    assert value(beside, "witcert_cells_tv_certified_total", **QUANTIZER) == 1
    assert value(registry, "witcert_audit_mismatches_total", **QUANTIZER) == 0
    book.count_unknown("r", 3, "stride")
    book.finish("r", "stop")
    assert value(registry, "witcert_cells_total", status="measured", **QUANTIZER) == 4
    # 3 unmeasured rows of 2 layers and 2 heads, and the excluded layer of 2 measured rows
    assert value(registry, "witcert_cells_total", status="unknown", **QUANTIZER) == 3 * 4 + 2 * 2
    assert value(registry, "witcert_cells_tv_certified_total", **QUANTIZER) == 2
    assert value(registry, "witcert_cells_damaged_total", **QUANTIZER) == 1
    assert value(registry, "witcert_rows_total", status="metered") == 2
    assert value(registry, "witcert_rows_total", status="unknown") == 3
    assert value(registry, "witcert_audited_cells_total", **QUANTIZER) == 2
    assert value(registry, "witcert_audit_violations_total", **QUANTIZER) == 1
    assert value(registry, "witcert_requests_total", **QUANTIZER) == 1
    assert value(registry, "witcert_cell_meter_count", **QUANTIZER) == 4
    assert value(registry, "witcert_cell_meter_sum", **QUANTIZER) == pytest.approx(1.6)
    assert value(registry, "witcert_cell_meter_bucket", le="0.2", **QUANTIZER) == 2
    assert value(registry, "witcert_request_worst_meter_bucket", le="0.99", **QUANTIZER) == 0
    assert value(registry, "witcert_request_worst_meter_bucket", le="1.0", **QUANTIZER) == 1


def test_a_request_without_measurements_has_no_worst_meter() -> None:
    registry = CollectorRegistry()
    book = RequestLedger(make_policy(), "sglang", 1, 2, metrics=Metrics(registry))
    book.count_unknown("r", 4, "stride")
    book.finish("r", "stop")
    assert value(registry, "witcert_requests_total", **QUANTIZER) == 1
    assert value(registry, "witcert_request_worst_meter_count", **QUANTIZER) in (None, 0)
    assert value(registry, "witcert_audit_violations_total", **QUANTIZER) == 0


def test_exact_cells_and_the_tokens_read_have_counters_of_their_own() -> None:
    registry = CollectorRegistry()
    book = RequestLedger(make_policy(), "sglang", 1, 2, metrics=Metrics(registry))
    book.observe("r", 0, 1, 0, batch([[0.0, 0.1]], quantized=[[0, 0]]), 0)
    book.observe("s", 0, 1, 0, batch([[0.0, 0.1]], quantized=[[0, 5]]), 0)
    book.finish("r", "stop")
    assert value(registry, "witcert_request_worst_meter_count", **QUANTIZER) in (None, 0)
    assert value(registry, "witcert_cells_total", status="exact", **QUANTIZER) == 3
    assert value(registry, "witcert_cells_total", status="measured", **QUANTIZER) == 1
    assert value(registry, "witcert_cells_total", status="unknown", **QUANTIZER) == 0
    assert value(registry, "witcert_cells_tv_certified_total", **QUANTIZER) == 1
    assert value(registry, "witcert_cell_meter_count", **QUANTIZER) == 1
    assert value(registry, "witcert_tokens_read_total", status="quantized", **QUANTIZER) == 5
    assert value(registry, "witcert_tokens_read_total", status="exact", **QUANTIZER) == 4 * 9 - 5
    assert value(registry, "witcert_rows_total", status="metered") == 2


def test_many_at_once_equal_one_by_one() -> None:
    values = torch.cat([torch.rand(500, dtype=torch.float64) ** 3, torch.tensor([0.0, *METER_BUCKETS])])
    registry = CollectorRegistry()
    at_once, single = (Histogram(n, n, buckets=METER_BUCKETS, registry=registry) for n in ("at_once", "single"))
    _observe_many(at_once, values, torch.tensor(METER_BUCKETS, dtype=torch.float64))
    for number in values.tolist():
        single.observe(number)
    for edge in (*map(str, METER_BUCKETS), "+Inf"):
        assert value(registry, "at_once_bucket", le=edge) == value(registry, "single_bucket", le=edge)
    assert value(registry, "at_once_sum") == pytest.approx(value(registry, "single_sum"))


PROCESS = """
import sys
from report_batches import batch, make_policy
from witcert_core import RequestLedger
from witcert_core.report.prometheus import Metrics

book = RequestLedger(make_policy(), "sglang", 1, 2, metrics=Metrics())
for step in range(1, int(sys.argv[1]) + 1):
    book.observe("r", 0, step, step, batch([[0.1, 0.3]]), 0)
book.finish("r", "stop")
"""


def test_processes_add_up(tmp_path: Path) -> None:
    """As an engine runs it: schedulers count into PROMETHEUS_MULTIPROC_DIR, the HTTP process sums up."""
    env = os.environ | {
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[1] / "common"),
    }
    for rows in ("2", "5"):
        subprocess.run([sys.executable, "-c", PROCESS, rows], env=env, check=True)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))  # type: ignore[no-untyped-call]
    text = generate_latest(registry).decode()
    assert 'witcert_cells_total{quantizer="int4_token_group",status="measured"} 14.0' in text
    assert 'witcert_cell_meter_bucket{le="0.2",quantizer="int4_token_group"} 7.0' in text
    assert 'witcert_cell_meter_count{quantizer="int4_token_group"} 14.0' in text
    assert 'witcert_rows_total{status="metered"} 7.0' in text
    assert 'witcert_audit_violations_total{quantizer="int4_token_group"} 0.0' in text
