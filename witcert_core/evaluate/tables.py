"""Results as tables: for the terminal and, the same cells, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from witcert_core.report.text import format_bytes, number_up, percent_down

Cells = Sequence[Sequence[str]]


def rich_table(title: str, columns: Sequence[str], rows: Cells) -> Table:
    """First column to the left, the others to the right."""
    table = Table(title=title, box=SIMPLE)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(columns: Sequence[str], rows: Cells) -> str:
    """A Markdown table, without a line break at its end."""
    lines = [list(columns), ["---"] * len(columns), *map(list, rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def interval(found: Mapping[str, Any] | None, signed: bool = False) -> str:
    """`0.83 [0.80, 0.86]`; a dash where there is none."""
    if found is None:
        return "-"
    sign = "+" if signed else ""
    return f"{found['value']:{sign}.3f} [{found['low']:{sign}.3f}, {found['high']:{sign}.3f}]"


SHOWN_RANKINGS = ("log_a_max", "uncertified_share")
COMPARISON_COLUMNS = (
    "KV cache",
    "mode",
    "score",
    "zero",
    "minus exact",
    "TV certified",
    "for any query",
    "exact cells",
    "damaged",
    "worst",
    "violations",
    "repaired blocks",
    "page-in",
    "lost",
    "AUROC of log A",
    "AUROC of the uncertified share",
)


def comparison_rows(comparison: Mapping[str, Any]) -> Cells:
    """A line for each quantizer and mode."""
    return [_comparison_row(row) for row in comparison["rows"]]


def exact_share(meter: Mapping[str, Any]) -> str:
    """Of the cells that were not left unknown, those that read nothing quantized."""
    seen = meter["cells_measured"] + meter["cells_exact"]
    return f"{100 * meter['cells_exact'] / seen:.1f} %" if seen else "unknown"


def audit(meter: Mapping[str, Any]) -> str:
    """Violations among the audited cells, and outputs that were no attention over what is stored, if there were any."""
    said = f"{meter['violations']} of {meter['audited']}"
    return f"{said}, {meter['mismatches']} OUTPUTS OFF" if meter.get("mismatches") else said


def _comparison_row(row: Mapping[str, Any]) -> list[str]:
    meter, repairs, ranking = row["meter"], row["repairs"], row["ranking"]
    measured = meter is not None and meter["cells_measured"] > 0
    nothing = "–" if meter is not None and meter["cells_exact"] else "unknown"
    audited = meter is not None and meter["audited"]
    return [
        row["quantizer"],
        row["mode"],
        interval(row["score"]),
        f"{row['zero_scores']} of {row['score']['count']}",
        interval(row["minus_exact"], signed=True),
        percent_down(meter["tv_certified_share"]) if measured else nothing,
        percent_down(meter["tv_certified_any_query_share"]) if measured else nothing,
        "unknown" if meter is None else exact_share(meter),
        percent_down(meter["damaged_share"]) if measured else nothing,
        number_up(meter["worst"], 3) if measured else nothing,
        audit(meter) if audited else "-",
        "-" if repairs is None else f"{repairs['blocks_median']:g} (max {repairs['blocks_max']})",
        "-" if repairs is None else format_bytes(repairs["bytes_total"]),
        "-" if ranking is None else str(ranking["log_a_max"]["lost"]),
        *("-" if ranking is None else interval(ranking[name]["auroc"]) for name in SHOWN_RANKINGS),
    ]
