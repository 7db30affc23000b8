"""The measured sections as one page of markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]


def table(columns: Sequence[tuple[str, Callable[[Row], str]]], rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(name for name, _ in columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(show(row) for _, show in columns) + " |" for row in rows]
    return "\n".join(lines)


def interval(found: dict[str, Any] | None, percent: bool = True) -> str:
    if found is None:
        return ""
    unit = 100 if percent else 1
    return f"{unit * found['value']:.0f} ({unit * found['low']:.0f} to {unit * found['high']:.0f})"


def share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


COLUMNS: dict[str, tuple[str, list[tuple[str, Callable[[Row], str]]]]] = {
    "capacity": (
        "Tokens at equal memory, by SGLang's own account (head_dim 128; free memory differs between starts, so per GB)",
        [
            ("cache", lambda r: r["cache"]),
            ("tokens", lambda r: f"{r['tokens']}"),
            ("GB", lambda r: f"{r['gb']:.2f}"),
            ("against bf16", lambda r: f"{r['ratio']:.3f}x"),
            ("by the layout", lambda r: f"{r['by_layout']:.3f}x"),
        ],
    ),
    "speed": (
        "Generated tokens a second (4 clients, prompts of 256, 64 new tokens, random weights, float32)",
        [
            ("policy", lambda r: r["policy"]),
            ("tokens/s", lambda r: f"{r['tokens_per_second']:.1f}"),
            ("of the unmetered server", lambda r: f"{r['ratio']:.2f}"),
        ],
    ),
    "original": (
        "Coverage on the original model: share of cells with a bound of at most 0.2",
        [
            ("quantizer", lambda r: r["quantizer"]),
            ("right, %", lambda r: interval(r["raw"])),
            ("certified", lambda r: share(r["certified"])),
            ("for any query (tier W)", lambda r: share(r["certified_any_query"])),
            ("violations", lambda r: f"{r['violations']}"),
        ],
    ),
    "twin": (
        "Needle accuracy on the outlier twin, % (95 % paired bootstrap); gate `combined`",
        [
            ("quantizer", lambda r: r["quantizer"]),
            ("raw", lambda r: interval(r["raw"])),
            ("gated", lambda r: interval(r.get("gated"))),
            ("raw - exact", lambda r: interval(r.get("raw_minus_exact"))),
            ("gated - exact", lambda r: interval(r.get("gated_minus_exact"))),
            ("certified raw", lambda r: share(r.get("certified_raw"))),
            ("paged in a request", lambda r: f"{r['repaired_bytes'] / 1024:.0f} KiB" if "repaired_bytes" in r else ""),
            ("violations", lambda r: f"{r['violations']} of {r['audited']}" if "audited" in r else ""),
        ],
    ),
    "gates": (
        "What gates restore on the twin, % of all keys and values of a request (offline, target TV 0.2, blocks of 16)",
        [
            ("quantizer", lambda r: r["quantizer"]),
            ("gate", lambda r: r["gate"]),
            ("right, %", lambda r: interval(r["right"])),
            ("minus exact", lambda r: interval(r["minus_exact"])),
            ("paged in, %", lambda r: interval(r["share"])),
        ],
    ),
}


def markdown(results: dict[str, Any]) -> str:
    parts = ["# SGLang on a CPU, measured", "", "Written by `make bench-sglang`; the figures are in `results.json`."]
    for name, (title, columns) in COLUMNS.items():
        if name in results:
            found = results[name]
            parts += ["", f"## {title}", "", table(columns, found["rows"]), ""]
            parts.append(f"`{found['command']}`, {found['date']}, {found['minutes']} minutes, {found['machine']}.")
    return "\n".join(parts) + "\n"
