"""`witcert bounds`: hold every bound against cells whose exact supremum is known."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from witcert_core.meter.bounds.vectors import FormResult, VectorCase, check_vectors, load_vectors

VIOLATED = 1
PIPE_WIDTH = 120
SHOWN_VIOLATIONS = 10

app = typer.Typer(no_args_is_help=True, help="The bounds on total variation.")


@app.callback()
def bounds() -> None:
    """The bounds on total variation."""


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help='JSON: {"cases": [{"p_compressed", "radius", "sup_tv"}, ...]}')],
) -> None:
    """Compare all forms with the suprema in FILE; exit 1 if one is ever below, 2 if the file is bad."""
    cases = load_vectors(file)
    results = check_vectors(cases)
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(_table(results, cases))
    zero = sum(case.sup_tv == 0.0 for case in cases)
    if zero:
        typer.echo(f"{zero} of {len(cases)} cases have supremum 0, where no ratio exists; they are left out of it")
    violations = [(result, i) for result in results for i in result.violations]
    for result, i in violations[:SHOWN_VIOLATIONS]:
        typer.echo(f"VIOLATED: {result.name} is {result.values[i]!r}, below {cases[i].sup_tv!r}, in cases[{i}]")
    if len(violations) > SHOWN_VIOLATIONS:
        typer.echo(f"and {len(violations) - SHOWN_VIOLATIONS} more")
    if violations:
        raise typer.Exit(VIOLATED)


def _table(results: list[FormResult], cases: list[VectorCase]) -> Table:
    table = Table(title="bounds clipped to 1, against the supremum", box=SIMPLE)
    for name in (
        "form",
        "cases",
        "violations",
        "says 1",
        "median ratio",
        "95 % ratio",
        "largest at supremum 0",
    ):
        table.add_column(name, justify="left" if name == "form" else "right", no_wrap=True)
    for result in results:
        table.add_row(
            result.name,
            str(len(cases)),
            f"[red]{len(result.violations)}[/red]" if result.violations else "0",
            str(result.vacuous),
            _ratio(result, 0.5),
            _ratio(result, 0.95),
            "-" if result.at_zero is None else f"{result.at_zero:.4g}",
        )
    return table


def _ratio(result: FormResult, share: float) -> str:
    return f"{result.quantile(share):.3f}" if result.ratios else "-"
