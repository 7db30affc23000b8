"""Figures as SVG, drawn from results and nothing else. matplotlib comes with the extra `witcert[eval]`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from witcert_core.evaluate.extras import require

_STYLE = {
    "svg.hashsalt": "witcert",
    "svg.fonttype": "none",  # text stays text
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
MODE_COLOURS = {"raw": "#c0392b", "gated": "#2471a3", "exact": "#333333"}
FORM_COLOURS = {
    "eform": "#c0392b",
    "tanh": "#b7950b",
    "rms": "#7d3c98",
    "jensen": "#5dade2",
    "needle": "#48c9b0",
    "meter": "#1a5276",
    "extremal": "#333333",
}


@contextmanager
def figure(path: Path, columns: int = 1, rows: int = 1, size: tuple[float, float] = (4.2, 3.2)) -> Iterator[Any]:
    """Axes [rows][columns] to draw on; written to `path` at the end, the same bytes for the same figure."""
    matplotlib = require("matplotlib")
    matplotlib.use("svg")
    pyplot = require("matplotlib.pyplot")
    with matplotlib.rc_context(_STYLE):
        made, axes = pyplot.subplots(rows, columns, figsize=(size[0] * columns, size[1] * rows), squeeze=False)
        try:
            yield axes
            made.savefig(path, format="svg", metadata={"Date": None})
        finally:
            pyplot.close(made)


def plot_comparison(comparison: Mapping[str, Any], path: Path) -> None:
    """Score of each quantizer, raw and gated, with intervals, beside the exact cache; below, the share certified."""
    rows = comparison["rows"]
    names = list(dict.fromkeys(row["quantizer"] for row in rows if row["mode"] != "exact"))
    with figure(path, rows=2, size=(max(4.2, 1.2 + 0.9 * len(names)), 2.3)) as axes:
        scores, certified = axes[0][0], axes[1][0]
        for row in rows:
            score = row["score"]
            if row["mode"] == "exact":
                scores.axhspan(score["low"], score["high"], color=MODE_COLOURS["exact"], alpha=0.12)
                scores.axhline(score["value"], color=MODE_COLOURS["exact"], linewidth=1, label="exact")
                continue
            x = names.index(row["quantizer"]) + (-0.14 if row["mode"] == "raw" else 0.14)
            error = [[score["value"] - score["low"]], [score["high"] - score["value"]]]
            colour = MODE_COLOURS[row["mode"]]
            scores.errorbar([x], [score["value"]], yerr=error, fmt="o", color=colour, capsize=3, label=row["mode"])
            share = None if row["meter"] is None else row["meter"]["tv_certified_any_query_share"]
            if share is not None:
                certified.bar([x], [100 * share], width=0.26, color=colour)
        scores.set_ylim(-0.03, 1.05)
        scores.set_ylabel("score")
        scores.set_xticks(range(len(names)), [""] * len(names))
        certified.set_ylabel("cells certified (TV), %")
        certified.set_xticks(range(len(names)), names, rotation=20, ha="right")
        certified.set_xlim(scores.get_xlim())
        _legend_once(scores)


def plot_lines(
    path: Path,
    panels: Sequence[tuple[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]]],
    *,
    x_label: str,
    y_label: str,
    x_scale: str = "linear",
    finish: Callable[[Any], None] | None = None,
) -> None:
    """Panels side by side, each a title and named lines (x, y); finish draws on each panel last."""
    with figure(path, columns=len(panels)) as axes:
        for ax, (title, lines) in zip(axes[0], panels, strict=True):
            for name, (x, y) in lines.items():
                style = "--" if name == "extremal" else "-"
                ax.plot(x, y, style, label=name, color=FORM_COLOURS.get(name), linewidth=1.6)
            ax.set_title(title)
            ax.set_xlabel(x_label)
            ax.set_xscale(x_scale)
            if finish is not None:
                finish(ax)
        axes[0][0].set_ylabel(y_label)
        axes[0][-1].legend()


def _legend_once(ax: Any) -> None:
    """A legend in which each name stands once."""
    handles, labels = ax.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    ax.legend(once.values(), once.keys())
