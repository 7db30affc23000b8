"""The root command. A user's mistake is one line on stderr and exit code 2, never a traceback."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer

from witcert_core.cli import bounds, capacity, doctor, eval, meter, policy, quantizers, sweep
from witcert_core.errors import WitCertError

USER_ERROR = 2

# Newer versions of typer bring their own copy of click, older ones use the installed one; this fits either.
_ClickError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(
    name="witcert",
    help="A runtime meter for KV-cache quantization.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(policy.app, name="policy")
app.add_typer(bounds.app, name="bounds")
app.add_typer(eval.app, name="eval")
app.add_typer(sweep.app, name="sweep")
app.command(name="quantizers")(quantizers.show)
app.command()(doctor.doctor)
app.command(name="capacity")(capacity.show)
app.command(name="meter")(meter.show)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"witcert {version('witcert')}")
        raise typer.Exit


@app.callback()
def root(
    wanted: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """A runtime meter for KV-cache quantization."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        code = app(
            args=None if arguments is None else list(arguments), prog_name="witcert", standalone_mode=False
        )
    except WitCertError as error:
        return _complain(str(error))
    except _ClickError as error:
        return _complain(error.format_message())
    except typer.Abort:
        return _complain("aborted")
    return code if isinstance(code, int) else 0


def _complain(message: str) -> int:
    if message:  # empty where help was printed for want of a subcommand
        print(f"witcert: {' '.join(message.split())}", file=sys.stderr)
    return USER_ERROR
