"""What one server showed over all questions: answers against the expected ones, and the meter's summaries added up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from witcert_demo.chat import ChatQuestion
from witcert_demo.tasks import Sample

Grid = list[list[float | None]]


@dataclass
class Asked:
    """One question with the server's answer and, from a metered server, its summary.

    open: it has many right answers, so that `right` says nothing.
    """

    sample: Sample | ChatQuestion
    answer: str
    right: bool
    summary: dict[str, Any] | None
    open: bool = False


@dataclass
class Tally:
    """Running totals of one server. Every figure the demonstration prints comes from here."""

    name: str
    asked: list[Asked] = field(default_factory=list)
    measured: int = 0
    exact: int = 0
    unknown: int = 0
    certified: int = 0
    certified_any_query: int = 0
    tier: str = ""
    audited: int = 0
    violations: int = 0
    mismatches: int = 0
    worst: float = 0.0
    tv_max: float = 0.0
    forms: Counter[str] = field(default_factory=Counter)
    by_layer_head: Grid = field(default_factory=list)
    tau: float = 0.0

    @property
    def right(self) -> int:
        return sum(item.right for item in self.asked)

    @property
    def scored(self) -> int:
        """Of how many `right` are right."""
        return sum(not item.open for item in self.asked)

    def changed(self, exact: Tally) -> int:
        """Answers that are another text than `exact` gives."""
        return sum(a.answer != b.answer for a, b in zip(self.asked, exact.asked, strict=False))

    @property
    def certified_share(self) -> float | None:
        """Share of measured cells with a bound of at most tau; None before anything was measured."""
        return self.certified / self.measured if self.measured else None

    @property
    def any_query_share(self) -> float | None:
        """The same under the deterministic tier, which alone covers text the model generates itself."""
        return self.certified_any_query / self.measured if self.measured else None

    def add(self, item: Asked) -> None:
        self.asked.append(item)
        summary = item.summary
        if summary is None:
            return
        self.tau = summary["tau"]
        self.measured += summary["cells_measured"]
        self.exact += summary["cells_exact"]
        self.unknown += summary["cells_unknown"]
        self.certified += summary["tv_certified_cells"]
        beside = summary["deterministic_beside"]
        self.certified_any_query += summary["tv_certified_cells"] if beside is None else beside["tv_certified_cells"]
        self.tier = summary["tier"]
        self.audited += summary["audit"]["cells"]
        self.violations += summary["audit"]["violations"]
        self.mismatches += summary["audit"]["mismatches"]
        self.tv_max = max(self.tv_max, summary["audit"]["tv_max"] or 0.0)
        self.forms.update(summary["forms"])
        if summary["worst"] is not None:
            self.worst = max(self.worst, summary["worst"]["meter"])
        self.by_layer_head = merge_worst(self.by_layer_head, summary["worst_by_layer_head"])

    def sentence(self, exact: Tally) -> str:
        """What the meter saw, in one sentence, beside what the answers say."""
        if self.scored == len(self.asked):
            answers = f"{self.right} of {self.scored} answers are right"
        else:
            answers = (
                f"{self.changed(exact)} of {len(self.asked)} texts changed, "
                f"{self.right} of {self.scored} hidden facts found"
            )
        answers += f" (16-bit cache: {exact.right} of {exact.scored})"
        share = self.certified_share
        if share is None:
            seen = "nothing quantized was read" if self.exact else "nothing was measured, so nothing is known"
            return f"{self.name}: {seen}; {answers}."
        if share == 1.0:
            seen = f"every cell was certified to move attention by at most {self.tau:g} (worst bound {self.worst:.3f})"
        else:
            any_query = "" if self.tier == "deterministic" else f", {1 - (self.any_query_share or 0):.1%} for any query"
            seen = (
                f"{1 - share:.1%} of the cells could not be certified at {self.tau:g}{any_query} "
                f"(worst bound {self.worst:.2f}, true movement up to {self.tv_max:.2f})"
            )
        return f"{self.name}: {seen}; {answers}."


def merge_worst(old: Grid, new: list[list[float | str | None]]) -> Grid:
    """The larger bound of each (layer, head); a cell nobody measured, or that read exact tokens only, stays None."""
    bounds = [[bound if isinstance(bound, float | int) else None for bound in row] for row in new]
    if not old:
        return bounds
    return [
        [b if a is None else a if b is None else max(a, b) for a, b in zip(row_a, row_b, strict=True)]
        for row_a, row_b in zip(old, bounds, strict=True)
    ]
