"""JSON lines of a run, added up as they are read: memory depends on the model's layers and heads, not on the run.

L layers, H query heads.
"""

from __future__ import annotations

import heapq
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from witcert_core.errors import InputError
from witcert_core.report.ledger import REQUEST_SCHEMA
from witcert_core.report.prometheus import METER_BUCKETS
from witcert_core.report.records import CELL_SCHEMA

WORST_REQUESTS = 20
MOST_STEPS = 240
"""Bars of the picture by step; steps are put together in powers of two beyond that."""
MOST_WORDS = 200
"""Reasons, quantizers and the like that are told apart; the rest is one."""
REST = "others"
Mark = float | str | None
"""Of a layer and head: the worst bound, "exact", or None where nothing was measured."""


class Words(Counter[str]):
    """Counts by a word, of which there are at most `MOST_WORDS`."""

    def add(self, word: str, count: int = 1) -> None:
        self[word if word in self or len(self) < MOST_WORDS else REST] += count

    def extend(self, counts: Mapping[str, int]) -> None:
        for word, count in counts.items():
            self.add(word, count)


class Steps:
    """Bounds by the number of the query row in its request: cells, their largest, and counts by `METER_BUCKETS`."""

    def __init__(self) -> None:
        self.width = 1
        self.bars: list[list[int]] = []
        self.worst: list[float] = []

    def add(self, step: int, meter: float) -> None:
        """step from 1."""
        while (step - 1) // self.width >= MOST_STEPS:
            self._halve()
        place = (step - 1) // self.width
        while len(self.bars) <= place:
            self.bars.append([0] * len(METER_BUCKETS))
            self.worst.append(0.0)
        self.bars[place][min(bisect_left(METER_BUCKETS, meter), len(METER_BUCKETS) - 1)] += 1
        self.worst[place] = max(self.worst[place], meter)

    def _halve(self) -> None:
        self.width *= 2
        pairs = [self.bars[i : i + 2] for i in range(0, len(self.bars), 2)]
        self.bars = [[sum(both) for both in zip(*pair, strict=True)] for pair in pairs]
        self.worst = [max(self.worst[i : i + 2]) for i in range(0, len(self.worst), 2)]

    def upper(self, place: int, share: float) -> float | None:
        """A bound that at least `share` of a bar's cells are at most: the edge of a bucket; None without a cell."""
        counts, wanted = self.bars[place], share * sum(self.bars[place])
        reached = 0
        for edge, count in zip(METER_BUCKETS, counts, strict=True):
            reached += count
            if reached >= wanted and reached:
                return min(edge, self.worst[place])
        return None


@dataclass
class Run:
    """What a file says in all. `steps` are of cells where the file has them (`cells`), else of requests' worst ones."""

    name: str
    requests: int = 0
    cells: int = 0
    malformed: int = 0
    first_malformed: str = ""
    quantizers: Words = field(default_factory=Words)
    engines: Words = field(default_factory=Words)
    claims: Words = field(default_factory=Words)
    taus: Words = field(default_factory=Words)
    gates: Words = field(default_factory=Words)
    finished: Words = field(default_factory=Words)
    unknown: Words = field(default_factory=Words)
    forms: Words = field(default_factory=Words)
    tiers: Words = field(default_factory=Words)
    excluded: dict[str, str] = field(default_factory=dict)
    sums: Counter[str] = field(default_factory=Counter)
    gate: Counter[str] = field(default_factory=Counter)
    tau: float = 1.0
    """The strictest of the requests'."""
    tv_max: float = 0.0
    delta_max: float = 0.0
    grid: list[list[Mark]] = field(default_factory=list)
    layers: dict[int, Counter[str]] = field(default_factory=dict)
    by_cells: Steps = field(default_factory=Steps)
    by_requests: Steps = field(default_factory=Steps)
    request_worst: list[int] = field(default_factory=lambda: [0] * len(METER_BUCKETS))
    _worst: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def steps(self) -> Steps:
        return self.by_cells if self.cells else self.by_requests

    @property
    def worst(self) -> list[dict[str, Any]]:
        """Requests, violated ones first, then by worst bound and log A."""
        return [row for *_, row in sorted(self._worst, key=lambda entry: entry[:-1], reverse=True)]

    @property
    def violations(self) -> int:
        return self.sums["violations"] + self.sums["mismatches"] + self.sums["sample_violations"]

    @property
    def certified_share(self) -> float | None:
        """Of the measured cells; None if there are none."""
        return self.sums["tv_certified_cells"] / self.sums["cells_measured"] if self.sums["cells_measured"] else None

    def add(self, record: Mapping[str, Any]) -> None:
        """A record of schema witcert.request/1 or witcert.cell/1; others are passed over.

        Raises:
            KeyError, TypeError, ValueError: it is not what its schema says.
        """
        schema = record.get("schema")
        if schema == CELL_SCHEMA:
            if record["status"] == "measured":
                self.by_cells.add(record["step"], record["meter"])
                self.cells += 1
        elif schema == REQUEST_SCHEMA:
            self._request(record)

    def _request(self, record: Mapping[str, Any]) -> None:
        audit, sample, worst = record["audit"], record["sample"], record["worst"]
        sums = {name: record[name] for name in ("rows_seen", "rows_metered", "damaged_cells", "tv_certified_cells")}
        sums |= {name: record[name] for name in ("cells_measured", "cells_exact", "cells_unknown")}
        sums |= {name: audit[name] for name in ("violations", "mismatches", "outputs")}
        sums["audited"] = audit["cells"]
        sums["sample_violations"] = 0 if sample is None else sample["violations"]
        sums["sampled"] = 0 if sample is None else sample["cells"]
        sums |= {f"tokens_{kind}": count for kind, count in record["tokens_read"].items()}
        sums["any_query"] = _any_query(record)
        sums["out_unbounded"] = bool(record["out_unbounded_layers"])
        grid, layers = record["worst_by_layer_head"], record["by_layer"]
        self._check_shape(grid)
        gate = {k: v for k, v in record["gate"].items() if isinstance(v, int)}
        score = (audit["violations"] + audit["mismatches"], -1.0 if worst is None else worst["meter"], _size(record))
        # Nothing is counted of a record that breaks off above.
        self.requests += 1
        self.sums.update(sums)
        self.gate.update(gate)
        for words, word in (
            (self.quantizers, record["quantizer"]),
            (self.engines, record["engine"]),
            (self.claims, record["claim"]),
            (self.taus, f"{record['tau']:g}"),
            (self.gates, record["gate"]["kind"]),
            (self.finished, str(record["finish_reason"])),
        ):
            words.add(word)
        for words, counts in (
            (self.unknown, record["unknown_reasons"]),
            (self.forms, record["forms"]),
            (self.tiers, record["tier_cells"]),
        ):
            words.extend(counts)
        self.tau = min(self.tau, record["tau"])
        self.excluded |= record["layers_excluded"]
        self.tv_max = max(self.tv_max, audit["tv_max"] or 0.0)
        self.delta_max = max(self.delta_max, record["delta"]["spent"])
        self._merge(grid)
        for layer in layers:
            counts = {key: layer[key] for key in ("cells", "cells_exact", "tv_certified_cells")}
            self.layers.setdefault(layer["layer"], Counter()).update(counts)
        if worst is not None:
            self.by_requests.add(worst["step"], worst["meter"])
            self.request_worst[min(bisect_left(METER_BUCKETS, worst["meter"]), len(METER_BUCKETS) - 1)] += 1
        self._keep_worst((*score, -self.requests), record)

    def _check_shape(self, grid: list[list[Mark]]) -> None:
        if self.grid and [len(row) for row in grid] != [len(row) for row in self.grid]:
            raise ValueError("its layers or heads are not those of the requests before it; another model's?")

    def _merge(self, grid: list[list[Mark]]) -> None:
        if not self.grid:
            self.grid = [[None] * len(row) for row in grid]
        for row, new in zip(self.grid, grid, strict=True):
            for head, mark in enumerate(new):
                row[head] = worse(row[head], mark)

    def _keep_worst(self, score: tuple[Any, ...], record: Mapping[str, Any]) -> None:
        if len(self._worst) == WORST_REQUESTS and score <= self._worst[0][: len(score)]:
            return
        kept = ("request_id", "quantizer", "worst", "tv_certified_share", "cells_measured", "cells_exact")
        row = {key: record[key] for key in (*kept, "cells_unknown", "finish_reason", "log_a_max", "risk")}
        row["violations"] = score[0]
        entry = (*score, row)
        if len(self._worst) < WORST_REQUESTS:
            heapq.heappush(self._worst, entry)
        else:
            heapq.heapreplace(self._worst, entry)


def worse(mark: Mark, other: Mark) -> Mark:
    """Of two marks of one layer and head the one that says more against it: bounds before exact before unknown."""
    if mark is None or (isinstance(mark, str) and other is not None):
        return other
    return mark if other is None or isinstance(other, str) or isinstance(mark, str) else max(mark, other)


def _any_query(record: Mapping[str, Any]) -> int:
    """Cells certified by deterministic bounds."""
    beside = record["deterministic_beside"]
    return int((record if beside is None else beside)["tv_certified_cells"])


def _size(record: Mapping[str, Any]) -> float:
    found = record["log_a_max"]
    return -1.0 if found is None else float(found)  # "inf" is one


def read_run(path: Path) -> Run:
    """Add up a file: records of a server (`report.jsonl`), or lines of `witcert meter --json`.

    Lines that are neither are counted, and the first one is named.

    Raises:
        InputError: an unreadable file, or one without a request.
    """
    run = Run(path.name)
    try:
        for number, line in _lines(path):
            try:
                data = json.loads(line)
                run.add(data.get("summary", data))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                run.malformed += 1
                what = f"has no {error}" if isinstance(error, KeyError) else str(error)
                run.first_malformed = run.first_malformed or f"line {number}: {what}"
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if not run.requests:
        why = f" ({run.first_malformed})" if run.malformed else ""
        raise InputError(
            f"{path}: holds no request's summary (schema {REQUEST_SCHEMA}){why}; name a server's report.jsonl, or what "
            "`witcert meter --json` wrote"
        )
    return run


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.isspace():
                yield number, line
