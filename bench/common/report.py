"""The measured sections as one page of markdown; the columns that both engines' pages have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Columns = Mapping[str, Callable[[Row], str]]
"""Head of a column -> what it shows of a row."""


def table(columns: Columns, rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(show(row) for show in columns.values()) + " |" for row in rows]
    return "\n".join(lines)


def interval(found: dict[str, Any] | None, percent: bool = True) -> str:
    if found is None:
        return ""
    unit = 100 if percent else 1
    return f"{unit * found['value']:.0f} ({unit * found['low']:.0f} to {unit * found['high']:.0f})"


def share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


CAPACITY: Columns = {
    "cache": lambda r: r["cache"],
    "tokens": lambda r: f"{r['tokens']}",
    "against bf16": lambda r: f"{r['ratio']:.3f}x",
    "by the layout": lambda r: f"{r['by_layout']:.3f}x",
}
SPEED: Columns = {
    "policy": lambda r: r["policy"],
    "tokens/s": lambda r: f"{r['tokens_per_second']:.1f}",
    "of the unmetered one": lambda r: f"{r['ratio']:.2f}",
}
ORIGINAL: Columns = {
    "quantizer": lambda r: r["quantizer"],
    "right, %": lambda r: interval(r["raw"]),
    "certified": lambda r: share(r["certified"]),
    "for any query (deterministic tier)": lambda r: share(r["certified_any_query"]),
    "violations": lambda r: f"{r['violations']}",
}
TWIN: Columns = {
    "quantizer": lambda r: r["quantizer"],
    "raw": lambda r: interval(r["raw"]),
    "gated": lambda r: interval(r.get("gated")),
    "raw - exact": lambda r: interval(r.get("raw_minus_exact")),
    "gated - exact": lambda r: interval(r.get("gated_minus_exact")),
    "certified raw": lambda r: share(r.get("certified_raw")),
    "paged in a request": lambda r: f"{r['repaired_bytes'] / 1024:.0f} KiB" if "repaired_bytes" in r else "",
    "violations": lambda r: f"{r['violations']} of {r['audited']}" if "audited" in r else "",
}

SECTIONS: dict[str, tuple[str, Columns]] = {
    "speed": ("Generated tokens a second (4 prompts of 256 at once, 64 new tokens, random weights, float32)", SPEED),
    "original": ("Coverage on the original model: share of cells with a bound of at most 0.2", ORIGINAL),
    "twin": ("Needle accuracy on the outlier twin, % (95 % paired bootstrap); gate `combined`", TWIN),
}
"""Name -> title and columns of the sections that are the same for every engine."""


def markdown(results: Mapping[str, Any], head: str, sections: Mapping[str, tuple[str, Columns]]) -> str:
    """A page: `head`, then every section of `results` under its title, and how it was made."""
    parts = [head]
    for name, (title, columns) in sections.items():
        if name in results:
            found = results[name]
            parts += ["", f"## {title}", "", table(columns, found["rows"]), ""]
            parts.append(f"`{found['command']}`, {found['date']}, {found['minutes']} minutes, {found['machine']}.")
    return "\n".join(parts) + "\n"
