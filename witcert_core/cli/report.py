"""`witcert report`: a run's JSON lines as one page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from witcert_core.errors import InputError


def show(
    run: Annotated[Path, typer.Argument(help="report.jsonl of a server, or what `witcert meter --json` wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page: one HTML file that loads nothing.")],
    other: Annotated[Path | None, typer.Argument(help="Another run to put beside it.")] = None,
    policy: Annotated[Path | None, typer.Option(help="Policy file of the run, shown as it is.")] = None,
    status: Annotated[Path | None, typer.Option(help="What /witcert/status of its server answered, as JSON.")] = None,
) -> None:
    """One page about a run, or two side by side, for whoever was not there; it reads without a network."""
    from witcert_core.evaluate.drift import read_text
    from witcert_core.report.page.render import render_page
    from witcert_core.report.page.run import read_run

    texts = [None if path is None else read_text(path) for path in (policy, status)]
    known = None if texts[1] is None else _mapping(texts[1], status)
    runs = [read_run(path) for path in (run, other) if path is not None]
    out.write_text(render_page(runs, texts[0] or "", known), encoding="utf-8")


def _mapping(text: str, path: Path | None) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(f"{path}: is not JSON: {error}; save what /witcert/status answers") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: holds no JSON object; save what /witcert/status answers")
    return found
