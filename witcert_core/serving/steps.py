"""What one forward pass measured, on its way to the ledger.

Engines run ahead: a pass may have computed a row for a request that had just finished. So a step's cells are counted
only for the requests whose tokens the engine commits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from witcert_core.meter.cells import CellBatch
from witcert_core.meter.measure import bound_cells
from witcert_core.meter.truth import SketchedBounds, Truth
from witcert_core.report.ledger import RequestLedger
from witcert_core.serving.device.sums import Sums, settled
from witcert_core.serving.passes import MeteredRow
from witcert_core.serving.probed import ProbedPass


@dataclass(frozen=True)
class Verdict:
    """What a repairing gate did for request `index` of the batch in one layer; status [R, H] int64 of `CellStatus`."""

    index: int
    status: Tensor
    repaired_blocks: int
    repaired_bytes: int
    gave_up: str

    @classmethod
    def joined(cls, parts: Sequence[Verdict]) -> Verdict:
        """The verdicts of all ranks on the same rows, heads side by side."""
        reasons = sorted({part.gave_up for part in parts if part.gave_up})
        return cls(
            parts[0].index,
            torch.cat([part.status for part in parts], 1),
            sum(part.repaired_blocks for part in parts),
            sum(part.repaired_bytes for part in parts),
            "; ".join(reasons),
        )


@dataclass
class StepCells:
    """All cells of one forward pass: per layer, R rows, in the order of `rows`.

    deterministic_layers: the same rows under the deterministic radii, when `layers` used the dither law.
    summed, deterministic_summed: layers whose bounds are still to be taken, by `settle`.
    without_law: requests of the batch that spend no failure probability, with the reason.
    lost: layers that should have measured these rows and did not, with the reason; their cells are unknown.
    verdicts: what a repairing gate did, one for each layer and request.
    truths: what compression really did to the audited rows of sampled requests. not_audited: their other rows, by
    index in the batch and reason. sketched, not_sketched: likewise bounds from sketches, and rows without them.
    drafts: index in the batch -> how many drafts the pass verified, where any.
    """

    request_ids: list[str]
    rows: list[MeteredRow]
    layers: dict[int, CellBatch] = field(default_factory=dict)
    deterministic_layers: dict[int, CellBatch] = field(default_factory=dict)
    summed: dict[int, Sums] = field(default_factory=dict)
    deterministic_summed: dict[int, Sums] = field(default_factory=dict)
    unmetered: Counter[tuple[int, str]] = field(default_factory=Counter)
    verdicts: list[Verdict] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)
    without_law: dict[int, str] = field(default_factory=dict)
    truths: dict[int, Truth] = field(default_factory=dict)
    not_audited: Counter[tuple[int, str]] = field(default_factory=Counter)
    sketched: dict[int, SketchedBounds] = field(default_factory=dict)
    not_sketched: Counter[tuple[int, str]] = field(default_factory=Counter)
    drafts: dict[int, int] = field(default_factory=dict)
    probed: ProbedPass = field(default_factory=ProbedPass)

    def know(self, layer: int, truth: Truth | None) -> None:
        """Keep what is known of some rows of a layer, beside what already is."""
        if truth is not None:
            self.truths[layer] = Truth.of_parts([self.truths[layer], truth]) if layer in self.truths else truth

    def bound_by_sketches(self, layer: int, found: SketchedBounds | None) -> None:
        """Keep the sketches' bounds of some rows of a layer, beside what already is."""
        if found is not None:
            before = [self.sketched[layer]] if layer in self.sketched else []
            self.sketched[layer] = SketchedBounds.of_parts([*before, found])

    def settle(self) -> None:
        """Take the bounds of all layers at once; the one place where sums of a device are waited for."""
        for summed, layers in ((self.summed, self.layers), (self.deterministic_summed, self.deterministic_layers)):
            found = bound_cells(settled(list(summed.values())))
            layers |= dict(zip(summed, found, strict=True))
            summed.clear()

    def count(
        self, ledger: RequestLedger, committed: Collection[int], right: Mapping[int, int] | None = None
    ) -> dict[int, str]:
        """Count the rows of the committed requests, by index in the batch. right: how many drafts of each were.

        Rows of other drafts are of a text that is not served: counted are what they spent and what they broke.
        Returns, for those whose gate gave up in some layer, why.
        """
        right = right or {}
        kept = [row.draft <= right.get(row.request, 0) for row in self.rows]
        dropped = Counter(row.request for row, keep in zip(self.rows, kept, strict=True) if not keep)
        for index, why in self.without_law.items():
            if index in committed:
                ledger.claim_no_law(self.request_ids[index], why)
        for number, row in enumerate(self.rows):
            if row.request not in committed:
                continue
            if not kept[number]:
                ledger.count_rejected(self.request_ids[row.request], list(self.layers.values()), number)
                continue
            if self.lost and not self.layers:
                ledger.count_unknown(self.request_ids[row.request], 1, next(iter(self.lost.values())))
                continue
            for layer, cells in self.layers.items():
                ledger.observe(
                    self.request_ids[row.request],
                    layer,
                    row.ordinal,
                    row.position,
                    cells,
                    number,
                    # A row beyond the declared ones was metered deterministically to begin with.
                    deterministic_cells=self.deterministic_layers.get(layer)
                    if float(cells.delta_loc[number]) > 0
                    else None,
                )
            for layer, truth in self.truths.items():
                known = truth.of(number)
                if known is not None and layer in self.layers:
                    tv, out = known
                    ledger.compare(self.request_ids[row.request], self.layers[layer], number, tv, out)
            for layer, bounds in self.sketched.items():
                found = bounds.of(number)
                if found is not None and layer in self.layers:
                    known = self.truths[layer].of(number) if layer in self.truths else None
                    rid, cells = self.request_ids[row.request], self.layers[layer]
                    ledger.sketch(rid, cells, number, found[0], None if known is None else known[0])
            for layer, reason in self.lost.items():
                ledger.count_lost(self.request_ids[row.request], layer, reason)
        for (index, reason), count in self.unmetered.items():
            if index in committed:  # rows of one request have one reason, its drafts' among them
                wrong = self.drafts.get(index, 0) - right.get(index, 0)
                ledger.count_unknown(self.request_ids[index], count - wrong + dropped[index], reason)
        for (index, reason), count in self.not_audited.items():
            if index in committed:
                ledger.count_not_audited(self.request_ids[index], count - dropped[index], reason)
        for (index, reason), count in self.not_sketched.items():
            if index in committed:
                ledger.count_not_sketched(self.request_ids[index], count - dropped[index], reason)
        counted = [number for number, row in enumerate(self.rows) if kept[number] and row.request in committed]
        self.probed.observe(ledger, committed, self.rows, counted, self.layers, self.deterministic_layers, self.lost)
        gave_up: dict[int, str] = {}
        for verdict in self.verdicts:
            if verdict.index not in committed:
                continue
            rid = self.request_ids[verdict.index]
            status = verdict.status
            if dropped[verdict.index]:
                of_request = [keep for row, keep in zip(self.rows, kept, strict=True) if row.request == verdict.index]
                status = status[torch.tensor(of_request)]
            if verdict.index in self.without_law or not ledger.claims_no_law(rid):  # else the gate went by the law
                ledger.count_verdict(rid, status)
            ledger.count_repair(rid, verdict.repaired_blocks, verdict.repaired_bytes)
            if verdict.gave_up:
                gave_up[verdict.index] = verdict.gave_up
        return gave_up
