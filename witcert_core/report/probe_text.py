"""The answer to a probe as a table on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

_BAR = 40


def render_probe(answer: dict[str, Any]) -> Group:
    """The table of an answer (schema witcert.probe/1) below the probe, and what the answer is about."""
    cells, unknown = answer["cells"], answer["unknown"]
    about = [f"{answer['rows']} rows", f"{cells['measured']} cells measured"]
    if cells["exact"]:
        about.append(f"{cells['exact']} exact")
    about += [f"{count} unknown ({reason})" for reason, count in unknown.items()]
    if answer["groups_left_out_cells"]:
        about.append(f"{answer['groups_left_out_cells']} in further groups")
    about.append(f"ended: {answer['ended']}" if answer["ended"] else "enabled")
    return Group(Text(answer["probe"], style="bold"), _table(answer), Text("; ".join(about)))


def _table(answer: dict[str, Any]) -> Table:
    table = Table()
    if "top" in answer:
        rows = [
            {"value": cell["value"], **{key: cell[key] for key in cell if key != "value"}} for cell in answer["top"]
        ]
    else:
        rows = [
            {**group["by"], **{key: group[key] for key in group if key not in ("by", "buckets")}}
            for group in answer["groups"]
        ]
    buckets = [group.get("buckets") for group in answer.get("groups", ())]
    for name in rows[0] if rows else ("cells",):
        table.add_column(name, justify="left" if name in ("request", "form", "phase", "status", "lora") else "right")
    if any(buckets):
        table.add_column("from", justify="right")
        table.add_column("distribution")
    for row, found in zip(rows, buckets or [None] * len(rows), strict=True):
        shown = [f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()]
        most = max((found or {"": 1}).values())
        bars = [(edge, f"{'#' * -(-_BAR * count // most)} {count}") for edge, count in (found or {}).items()]
        first = [*bars[0]] if bars else ["", ""] if any(buckets) else []
        table.add_row(*map(Text, [*shown, *first]))
        for edge, bar in bars[1:]:
            table.add_row(*[""] * len(shown), Text(edge), Text(bar))
    return table
