"""The root command. A user's mistake is one line on stderr and exit code 2, never a traceback.

Exit codes: 0 done; 1 an answer that is bad news (a bound was violated, an engine refuses); 2 the command could not do
what was asked; 130 stopped by Ctrl-C, 143 by SIGTERM; 141 nobody reads the output any more.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer

from witcert_core.cli import bounds, canary, capacity, doctor, eval, meter, policy, probe, quantizers, report
from witcert_core.errors import WitCertError

USER_ERROR = 2
INTERRUPTED = 130
NO_READER = 141

# Newer versions of typer bring their own copy of click, older ones use the installed one; this fits either.
_ClickError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(
    name="witcert",
    help="A runtime meter for KV-cache quantization.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit code: 0 done; 1 a bound was violated or an engine refuses; 2 this could not be done; 130 Ctrl-C; "
    "143 SIGTERM.",
)
app.add_typer(policy.app, name="policy")
app.add_typer(bounds.app, name="bounds")
app.add_typer(eval.app, name="eval")
app.command(name="quantizers")(quantizers.show)
app.command()(doctor.doctor)
app.command(name="capacity")(capacity.show)
app.command(name="meter")(meter.show)
app.command(name="probe")(probe.ask)
app.command(name="canary")(canary.show)
app.command(name="report")(report.show)


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
    _ready_streams()
    try:
        code = app(args=None if arguments is None else list(arguments), prog_name="witcert", standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # how click ends when the reader of a pipe has gone
            return NO_READER
        raise  # a signal that ends a campaign, with its own code
    except BrokenPipeError as error:
        _drop_output(error)
        return NO_READER
    except OSError as error:
        _drop_output(error)
        what = "reading or writing failed" if error.filename is None else f"{error.filename}: cannot be read or written"
        return _complain(f"{what}: {error.strerror or error}")
    except WitCertError as error:
        return _complain(str(error))
    except _ClickError as error:
        return _complain(error.format_message())
    except (KeyboardInterrupt, typer.Abort):
        _complain("stopped")
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _ready_streams() -> None:
    """A name that the terminal's encoding lacks is written as an escape; a stream that is closed takes everything."""
    sys.stdout = sys.stdout or io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_output(error: OSError) -> None:
    """What a full disk did not take must not be tried again when the interpreter ends, which would be a traceback."""
    if error.filename is None and isinstance(sys.stdout, io.TextIOWrapper):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str) -> int:
    if message:  # empty where help was printed for want of a subcommand
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(message.split()))
        print(f"witcert: {line}", file=sys.stderr)
    return USER_ERROR
