"""The ledger of an engine process that commits tokens."""

from __future__ import annotations

from collections.abc import Sequence

from witcert_core.policy import Policy
from witcert_core.report.jsonl import JsonlWriter
from witcert_core.report.prometheus import Metrics
from witcert_core.report.summary import RequestLedger


def make_ledger(
    engine: str, policy: Policy, layers: Sequence[int], num_qo_heads: int, metrics: Metrics | None
) -> RequestLedger:
    """A ledger for a model with these attention layers and `num_qo_heads` query heads on all ranks together.

    engine: its name in reports. Opens `report.jsonl` (ReportError if it cannot be written).
    """
    metered = frozenset(policy.meter.layers_of(layers))
    return RequestLedger(
        policy,
        engine=engine,
        num_layers=len(layers),
        num_qo_heads=num_qo_heads,
        layers_excluded={layer: "left out by meter.layers" for layer in layers if layer not in metered},
        jsonl=JsonlWriter(policy.report.jsonl) if policy.report.jsonl else None,
        metrics=metrics,
    )
