"""`witcert eval`: compare quantizers on tasks, and look at the bounds themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from witcert_core.evaluate.settings import MODES, parse_mode, parse_quantizer

PIPE_WIDTH = 220

app = typer.Typer(no_args_is_help=True, help="Evaluate quantizers on a model, offline or in a running server.")

Model = Annotated[str | None, typer.Option(help="Checkpoint directory or hub id; runs on the CPU with transformers.")]
Quantizers = Annotated[
    str, typer.Option(help="Comma-separated names, parameters after a colon: int4_token_group:group_size=64.")
]
Out = Annotated[Path, typer.Option(help="Directory for records, results and figures.")]
Samples = Annotated[int, typer.Option(min=1, help="Samples of every task at every length.")]
Tasks = Annotated[str, typer.Option(help="Comma-separated; empty: all of the source.")]
Source = Annotated[str, typer.Option(help="Task source; auto: the first that fits the tokenizer.")]
Seed = Annotated[int, typer.Option(help="Seed of the samples and of the bootstrap.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
PolicyFile = Annotated[Path | None, typer.Option(help="Policy file for everything but the quantizer.")]
Plot = Annotated[bool, typer.Option(help="Also draw figures (needs the extra witcert[eval]).")]


@app.callback()
def evaluation() -> None:
    """Evaluate quantizers on a model, offline or in a running server."""


@app.command()
def ruler(
    out: Out,
    model: Model = None,
    url: Annotated[str | None, typer.Option(help="A running server, metered or not, instead of --model.")] = None,
    quantizers: Quantizers = "",
    modes: Annotated[str, typer.Option(help="Comma-separated: raw, gated, exact.")] = ",".join(MODES),
    tasks: Tasks = "",
    lengths: Annotated[str, typer.Option(help="Comma-separated prompt lengths in tokens.")] = "4096",
    samples: Samples = 25,
    source: Source = "auto",
    seed: Seed = 0,
    policy: PolicyFile = None,
    dtype: Dtype = "auto",
    stride: Annotated[int, typer.Option(min=1, help="Meter every n-th generated token (offline).")] = 1,
    audit_every: Annotated[int, typer.Option(min=0, help="Audit every n-th metered row (offline).")] = 1,
    parallel: Annotated[int, typer.Option(min=1, help="Requests in flight at a server.")] = 4,
    plot: Plot = True,
) -> None:
    """Answers, certificates and repairs of each quantizer: raw, gated and exact, on the same samples.

    What --out holds is not asked again, so a run that was stopped goes on, and several servers can be added to one.
    """
    from witcert_core.evaluate.ruler_run import RulerRun, evaluate

    wanted = RulerRun(
        model=model,
        url=url,
        quantizers=[parse_quantizer(name) for name in split(quantizers, brackets=True)],
        modes=[parse_mode(mode) for mode in split(modes)],
        tasks=split(tasks),
        lengths=[parse_length(text) for text in split(lengths)],
        samples=samples,
        out=out,
        source=source,
        seed=seed,
        policy=policy,
        dtype=dtype,
        stride=stride,
        audit_every=audit_every,
        parallel=parallel,
        plot=plot,
    )
    evaluate(wanted, console())


def console() -> Console:
    """As wide as the terminal, or wide enough for a table in a file."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def split(text: str, brackets: bool = False) -> list[str]:
    """Comma-separated words. With `brackets`, `name:a=1,b=2` stays one: a word with = belongs to the one before."""
    words: list[str] = []
    for word in (part.strip() for part in text.split(",")):
        if brackets and words and "=" in word and ":" not in word:
            words[-1] += f",{word}"
        elif word:
            words.append(word)
    return words


def parse_length(text: str) -> int:
    """A positive number of tokens."""
    if not text.isdecimal() or int(text) == 0:
        raise typer.BadParameter(f"{text!r} is no number of tokens")
    return int(text)
