"""A run in plain words, and beside another one. Numbers are rounded against us."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from witcert_core.report.page.run import Run
from witcert_core.report.text import NONE, format_bytes, number_up, percent_down


def sentences(run: Run) -> list[str]:
    """What the meter saw, what it did not, and what that means."""
    s = run.sums
    who = f"{_listed(run.quantizers)} on {_listed(run.engines)}"
    found = [f"{_counted(run.requests, 'request')} under {who}."]
    cells = s["cells_measured"] + s["cells_exact"] + s["cells_unknown"]
    if s["cells_measured"]:
        worst = worst_of(run)
        said = "says nothing at all (it is 1)" if worst >= 1 else f"is at most {number_up(worst, 4)}"
        found.append(
            f"{percent_down(run.certified_share)} of the {_number(s['cells_measured'])} measured cells are certified: "
            f"compression moved their attention weights by at most τ = {_listed(run.taus)}. The bound of the worst one "
            f"{said}."
        )
    else:
        found.append("No cell was measured that read something quantized, so there is nothing to certify.")
    if s["damaged_cells"]:
        found.append(f"{_counted(s['damaged_cells'], 'cell')} certainly moved by more than τ.")
    if s["cells_exact"]:
        found.append(f"{_counted(s['cells_exact'], 'cell')} read nothing quantized; that certifies nothing either.")
    if s["cells_unknown"]:
        found.append(
            f"{percent_up(s['cells_unknown'] / cells)} of all cells are unknown: nobody measured them, and they may be "
            "as bad as can be."
        )
    if s["audited"] and not run.violations:
        found.append(
            f"{_counted(s['audited'], 'cell')} were compared with exact attention, and none exceeded its bound (the "
            f"largest true value is {number_up(run.tv_max, 4)})."
        )
    elif not s["audited"]:
        found.append("No cell was compared with exact attention (meter.audit_every, meter.audit_share).")
    if run.gate["repaired_blocks"]:
        found.append(
            f"The gate wrote {_counted(run.gate['repaired_blocks'], 'exact block')} back "
            f"({format_bytes(run.gate['bytes'])})."
        )
    if run.malformed:
        found.append(f"{_counted(run.malformed, 'line')} of the file could not be read ({run.first_malformed}).")
    return found


def alarm(run: Run) -> str:
    """Why nothing here is to be trusted; empty where no audit says so."""
    if not run.violations:
        return ""
    return (
        f"{_counted(run.violations, 'audited value')} broke a bound, or came of another attention than the meter "
        "believes. Nothing on this page can be trusted until that is explained; please report it."
    )


def worst_of(run: Run) -> float:
    """The largest bound of the grid; 0 where nothing was measured."""
    return max((mark for row in run.grid for mark in row if isinstance(mark, float | int)), default=0.0)


@dataclass(frozen=True)
class Figure:
    """A line of the table of figures; better: "less" or "more", empty where a difference is neither."""

    name: str
    value: Callable[[Run], float | None]
    shown: Callable[[float], str]
    better: str = ""


def _share(count: str) -> Callable[[Run], float | None]:
    def of(run: Run) -> float | None:
        cells = run.sums["cells_measured"] + run.sums["cells_exact"] + run.sums["cells_unknown"]
        return run.sums[count] / cells if cells else None

    return of


def _measured(value: Callable[[Run], float]) -> Callable[[Run], float | None]:
    return lambda run: value(run) if run.sums["cells_measured"] else None


FIGURES: Sequence[Figure] = (
    Figure("Requests", lambda run: run.requests, lambda x: _number(int(x))),
    Figure("Cells measured", lambda run: run.sums["cells_measured"], lambda x: _number(int(x))),
    Figure("of them certified", lambda run: run.certified_share, lambda x: percent_down(x), "more"),
    Figure(
        "certified for any query",
        _measured(lambda run: run.sums["any_query"] / run.sums["cells_measured"]),
        lambda x: percent_down(x),
        "more",
    ),
    Figure("Worst bound", _measured(worst_of), lambda x: number_up(x, 4), "less"),
    Figure("Cells unknown", _share("cells_unknown"), lambda x: percent_up(x), "less"),
    Figure("Cells exact", _share("cells_exact"), lambda x: percent_down(x)),
    Figure("Cells certainly beyond τ", lambda run: run.sums["damaged_cells"], lambda x: _number(int(x)), "less"),
    Figure("Cells audited", lambda run: run.sums["audited"], lambda x: _number(int(x))),
    Figure("Violations", lambda run: run.violations, lambda x: _number(int(x)), "less"),
    Figure("Requests with unbounded outputs", lambda run: run.sums["out_unbounded"], lambda x: _number(int(x)), "less"),
    Figure("Blocks repaired", lambda run: run.gate["repaired_blocks"], lambda x: _number(int(x)), "less"),
    Figure("Bytes brought back", lambda run: run.gate["bytes"], lambda x: format_bytes(int(x)), "less"),
    Figure("Cells within the gate's target", lambda run: run.gate["within_target"], lambda x: _number(int(x))),
    Figure("brought down by rank only", lambda run: run.gate["ranked"], lambda x: _number(int(x))),
    Figure("left above the target", lambda run: run.gate["above_target"], lambda x: _number(int(x)), "less"),
    Figure("Quantized tokens read by cells", lambda run: run.sums["tokens_quantized"], lambda x: _number(int(x))),
    Figure("Exact tokens read by cells", lambda run: run.sums["tokens_exact"], lambda x: _number(int(x))),
    Figure("Most δ spent by a request", lambda run: run.delta_max, lambda x: f"{x:.3g}", "less"),
)


def figures(runs: Sequence[Run]) -> list[tuple[str, list[str], str]]:
    """Name, a value for each run, and which run is better where there are two: its number, or nothing."""
    table = []
    for figure in FIGURES:
        values = [figure.value(run) for run in runs]
        shown = [NONE if value is None else figure.shown(value) for value in values]
        table.append((figure.name, shown, _better(figure.better, values)))
    return table


def _better(which: str, values: Sequence[float | None]) -> str:
    if len(values) < 2 or not which or values[0] is None or values[1] is None or values[0] == values[1]:
        return ""
    return "second" if (values[1] < values[0]) == (which == "less") else "first"


def percent_up(share: float) -> str:
    """What is not known: 0 % only where it is none."""
    return f"{math.ceil(share * 1000) / 10:g} %"


def _listed(words: dict[str, int]) -> str:
    return ", ".join(words) or NONE


def _number(count: int) -> str:
    return f"{count:,}"


def _counted(count: int, word: str) -> str:
    return f"{_number(count)} {word}{'' if count == 1 else 's'}"
