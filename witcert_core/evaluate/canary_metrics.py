"""What the canary exports to Prometheus: drift, and beside it what the meter saw of the same requests.

Labels are the quantizer's name and words of a fixed list; nothing here names a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from witcert_core.report.prometheus import METER_BUCKETS

NATS = (1e-6, 1e-5, 1e-4, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
SHARES = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0)
TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


class CanaryMetrics:
    """Of one canary, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"witcert_canary_{name}", text, ("quantizer",), buckets=buckets, registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"witcert_canary_{name}", text, labels, registry=self.registry)

        self.seen = counter("requests_seen", "Requests read from the traffic")
        self.taken = counter("requests_taken", "Requests drawn from it; at most the share of those seen")
        self.left_out = counter("requests_left_out", "Requests that were drawn and not scored", "reason")
        self.malformed = counter("lines_malformed", "Lines of the traffic that could not be read", "reason")
        self.up = Gauge("witcert_canary_server_up", "1 while the server answers", registry=self.registry)
        self._scored = counter(
            "requests_scored",
            "Requests scored by exact keys: whether the greedy text parted from the exact cache's, and whether the "
            "meter had certified every cell (all), not every one (some), or measured none (none)",
            "quantizer",
            "parted",
            "certified",
        )
        self._columns = {
            "kl": histogram(
                "kl_nats", "KL of the served next token's law from the exact one, mean of a request, at least", NATS
            ),
            "kl_max": histogram("kl_max_nats", "The same, largest of a request's tokens", NATS),
            "nll_increase": histogram(
                "nll_increase_nats", "Log-perplexity above the exact cache's on the same tokens; may be negative", NATS
            ),
            "top1": histogram("same_likeliest_share", "Share of a request's tokens with the same likeliest", SHARES),
            "kept": histogram("tokens_before_parting", "Tokens before a text parted, of those that did", TOKENS),
            "worst": histogram("request_worst_meter", "Worst bound of the scored requests", METER_BUCKETS),
        }

    def scored(self, record: Mapping[str, Any]) -> None:
        """Count a record (schema witcert.canary/1)."""
        quantizer, drift, meter = record["quantizer"], record["drift"], record["meter"]
        known, unknown = meter["cells_measured"], meter["cells_unknown"]
        all_certified = known and not unknown and meter["tv_certified_cells"] == known
        parted = drift["first_change"] is not None
        certified = "all" if all_certified else "some" if known else "none"
        self._scored.labels(quantizer, str(parted).lower(), certified).inc()
        values = {**drift, "kept": drift["first_change"], "worst": meter["worst"]}
        for name, column in self._columns.items():
            if values[name] is not None:
                column.labels(quantizer).observe(values[name])
