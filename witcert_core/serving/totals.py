"""All requests that finished since a server started, in one summary without ids."""

from __future__ import annotations

from collections import Counter
from typing import Any

SUMMARY_SCHEMA = "witcert.totals/1"
_CELLS = ("cells_measured", "cells_exact", "cells_unknown", "tv_certified_cells", "damaged_cells")
SUMS = ("rows_seen", "rows_metered", *_CELLS)
MAX_REASONS = 64
"""Different reasons that are counted apart; the engine's own are about ten."""


class Totals:
    """Counts and maxima of summaries (schema witcert.request/1); worst_by_layer: [L] highest bound of each layer."""

    def __init__(self) -> None:
        self.requests = 0
        self._sums: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._audit: Counter[str] = Counter()
        self._worst: float | None = None
        self._by_layer: list[float | None] = []

    def add(self, summary: dict[str, Any]) -> None:
        """Count a finished request."""
        self.requests += 1
        self._sums.update({name: summary[name] for name in SUMS})
        for reason, count in summary["unknown_reasons"].items():
            known = reason in self._reasons or len(self._reasons) < MAX_REASONS
            self._reasons[reason if known else "other"] += count
        self._audit.update({name: summary["audit"][name] for name in ("violations", "mismatches")})
        if summary["worst"] is not None:
            self._worst = max(summary["worst"]["meter"], self._worst or 0.0)
        layers = summary["worst_by_layer_head"]
        self._by_layer += [None] * (len(layers) - len(self._by_layer))
        for layer, heads in enumerate(layers):
            found = [worst for worst in heads if isinstance(worst, float)]
            if found:
                self._by_layer[layer] = max([*found, self._by_layer[layer] or 0.0])

    def as_dict(self) -> dict[str, Any]:
        """Schema witcert.totals/1. A layer, or all of it, of which nothing was measured has no worst bound: null."""
        return {
            "schema": SUMMARY_SCHEMA,
            "requests": self.requests,
            **{name: self._sums[name] for name in SUMS},
            "unknown_reasons": dict(self._reasons),
            "audit": dict(self._audit),
            "worst": self._worst,
            "worst_by_layer": self._by_layer,
        }
