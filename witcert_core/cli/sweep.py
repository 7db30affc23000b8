"""`witcert sweep`: quantize parts of a model."""

from __future__ import annotations

import typer

from witcert_core.cli.eval import (
    Dtype,
    Lengths,
    Out,
    Plot,
    Quantizers,
    RequiredModel,
    Samples,
    Seed,
    Source,
    Tasks,
    console,
    open_inputs,
    split,
)
from witcert_core.evaluate.settings import parse_quantizer

app = typer.Typer(no_args_is_help=True, help="Quantize parts of a model and see what is lost.")


@app.callback()
def sweeps() -> None:
    """Quantize parts of a model and see what is lost."""


@app.command()
def layers(
    model: RequiredModel,
    quantizers: Quantizers,
    out: Out,
    tasks: Tasks = "",
    lengths: Lengths = "1024",
    samples: Samples = 8,
    source: Source = "auto",
    seed: Seed = 0,
    dtype: Dtype = "auto",
    plot: Plot = True,
) -> None:
    """Contaminate one layer at a time, then all, then growing prefixes: answers lost, NLL, KL."""
    from witcert_core.evaluate import analyses

    specs = [parse_quantizer(name) for name in split(quantizers, brackets=True)]
    analyses.prepare(specs, out, plot=plot)
    inputs = open_inputs(model, dtype, source, tasks, lengths, samples, seed)
    analyses.write_layers(analyses.analyse_layers(inputs, specs, console()), out, console(), plot=plot)
