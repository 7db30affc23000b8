"""What a pass measured of the rows that probes took, handed to their board where the tokens are committed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from witcert_core.meter.cells import CellBatch
from witcert_core.probes.fields import PHASES
from witcert_core.probes.watches import ROWS_REACHED
from witcert_core.report.counts import PARTLY_MEASURED
from witcert_core.report.ledger import RequestLedger
from witcert_core.serving.passes import MeteredRow

NO_DETERMINISTIC_BOUND = "bounded under the probabilistic tier alone, which probes do not read"
Layers = Mapping[int, CellBatch]


@dataclass
class ProbedPass:
    """What probes need of a pass beside its cells; empty where none is enabled.

    facts: of its requests. lost: rows that probes wanted and nothing can meter, as in `RowPlan`. ended:
    the probes that have all their rows with this pass.
    """

    facts: list[dict[str, str | int]] = field(default_factory=list)
    lost: Counter[tuple[tuple[str, ...], int, str, bool]] = field(default_factory=Counter)
    ended: Sequence[str] = ()

    def observe(
        self,
        ledger: RequestLedger,
        committed: Collection[int],
        rows: Sequence[MeteredRow],
        counted: Sequence[int],
        layers: Layers,
        deterministic_layers: Layers,
        lost_layers: Mapping[int, str],
    ) -> None:
        """Let the probes see the rows `counted`, those of committed requests that are served; layers as in `StepCells`.

        A layer without deterministic bounds of a row is unknown, with the reason.
        """
        for number in counted:
            row = rows[number]
            if not row.probes:
                continue
            measured: dict[int, tuple[CellBatch, int]] = {}
            unknown: dict[int, str] = {}
            for layer, excluded in ledger.counted_layers.items():
                cells = layers.get(layer)
                if cells is not None and float(cells.delta_loc[number]) > 0:
                    cells = deterministic_layers.get(layer)
                if cells is not None:
                    measured[layer] = cells, number
                elif excluded or layer not in layers:
                    unknown[layer] = excluded or lost_layers.get(layer, PARTLY_MEASURED)
                else:
                    unknown[layer] = NO_DETERMINISTIC_BOUND
            facts = {**self.facts[row.request], "phase": _phase(row.generated)}
            facts |= {"position": row.position, "step": row.ordinal}
            seconds = ledger.probes.observe(row.probes, facts, measured, unknown)
            ledger.count_probed(only=row.charged == 0, seconds=seconds)
        for (names, index, reason, generated), count in self.lost.items():
            unknown = {layer: excluded or reason for layer, excluded in ledger.counted_layers.items()}
            for _ in range(count if index in committed else 0):
                ledger.probes.observe(names, {**self.facts[index], "phase": _phase(generated)}, {}, unknown)
        for name in self.ended:
            ledger.probes.end(name, ROWS_REACHED)


def _phase(generated: bool) -> int:
    return PHASES.index("generated" if generated else "prompt")
