"""The page of one run, or of two side by side: one file, that loads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from witcert_core.report.page.pictures import by_step, heat_map
from witcert_core.report.page.run import Run, Words
from witcert_core.report.page.words import alarm, figures, percent_up, sentences
from witcert_core.report.risk import MEANING
from witcert_core.report.text import NONE, number_up, percent_down


def render_page(runs: Sequence[Run], policy: str = "", status: Mapping[str, Any] | None = None) -> str:
    """HTML of one or two runs. policy: the text of its file. status: what `/witcert/status` said."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"certified": percent_down, "bound": lambda x: number_up(x, 4)}
    source = (files("witcert_core.report.page") / "page.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        runs=[_shown(run) for run in runs],
        figures=figures(runs),
        policy=policy,
        status=list(_flat(status or {})),
        version=version("witcert"),
        dash=NONE,
        risk=MEANING,
    )


def _flat(status: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Versions first, each by itself."""
    versions = status.get("versions")
    if isinstance(versions, dict):
        yield from ((f"version of {name}", found) for name, found in versions.items())
    yield from sorted((key, value) for key, value in status.items() if value is not versions)


def _shown(run: Run) -> dict[str, Any]:
    """What the template asks of a run."""
    return {
        "run": run,
        "alarm": alarm(run),
        "sentences": sentences(run),
        "heat_map": heat_map(run),
        "steps": by_step(run),
        "forms": _bars(run.forms),
        "unknown": _bars(run.unknown),
        "finished": _bars(run.finished),
    }


def _bars(counts: Words) -> list[tuple[str, int, str, float]]:
    """Word, count, share as text and as a number of 0 to 100, the largest first."""
    total = sum(counts.values())
    return [(word, n, percent_up(n / total), round(100 * n / total, 1)) for word, n in counts.most_common()]
