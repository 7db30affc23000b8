"""`witcert eval`: compare quantizers on tasks, and look at the bounds themselves."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from witcert_core.evaluate.settings import MODES, parse_mode, parse_quantizer

if TYPE_CHECKING:
    from witcert_core.evaluate.analyses import Inputs

PIPE_WIDTH = 220
INTERRUPTED = 130

app = typer.Typer(no_args_is_help=True, help="Evaluate quantizers on a model, offline or in a running server.")

Model = Annotated[str | None, typer.Option(help="Checkpoint directory or hub id; run with transformers.")]
RequiredModel = Annotated[str, typer.Option(help="Checkpoint directory or hub id; run with transformers.")]
Lengths = Annotated[str, typer.Option(help="Comma-separated prompt lengths in tokens.")]
Quantizers = Annotated[
    str, typer.Option(help="Comma-separated names, parameters after a colon: int4_token_group:group_size=64.")
]
Out = Annotated[Path, typer.Option(help="Directory for records, results and figures.")]
Samples = Annotated[int, typer.Option(min=1, help="Samples of every task at every length.")]
Tasks = Annotated[str, typer.Option(help="Comma-separated; empty: all of the source.")]
Source = Annotated[str, typer.Option(help="Task source; auto: the first that fits the tokenizer.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the samples and of the bootstrap.")]
Dtype = Annotated[str, typer.Option(help="Of the model: auto (its own), float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option(help="Of the model's layers: cpu, cuda or cuda:N; default: cpu.")]
DeviceMap = Annotated[
    str | None,
    typer.Option(help="Layers on several devices, as transformers spreads them: auto, or a JSON object of modules."),
]
PolicyFile = Annotated[Path | None, typer.Option(help="Policy file for everything but the quantizer.")]
Chat = Annotated[bool, typer.Option(help="Put each question into the model's chat template.")]
Plot = Annotated[bool, typer.Option(help="Also draw figures (needs matplotlib).")]


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
    device: Device = None,
    device_map: DeviceMap = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Meter every n-th generated token; default: the policy's, without one 1.")
    ] = None,
    audit_every: Annotated[
        int | None, typer.Option(min=0, help="Audit every n-th metered row; default: the policy's, without one 1.")
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Requests in flight at a server.")] = 4,
    engine: Annotated[
        str, typer.Option(help="offline, or sglang or vllm: a server is started for each quantizer and mode.")
    ] = "offline",
    server_options: Annotated[
        str, typer.Option(help="Options of those servers, quoted: '--attention-backend triton --disable-cuda-graph'.")
    ] = "",
    chat: Chat = False,
    plot: Plot = True,
) -> None:
    """Answers, certificates and repairs of each quantizer: raw, gated and exact, on the same samples.

    What --out holds is not asked again, so a run that was stopped goes on, and more samples, quantizers or running
    servers can be added later.
    """
    from witcert_core.evaluate.offline.placement import parse_placement
    from witcert_core.evaluate.ruler_run import RulerRun, evaluate

    wanted = RulerRun(
        model=model,
        url=url,
        quantizers=[parse_quantizer(name) for name in split(quantizers, brackets=True)],
        modes=[parse_mode(mode) for mode in some(modes, "--modes")],
        tasks=split(tasks),
        lengths=parse_lengths(lengths),
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
        engine=engine,
        server_options=split_options(server_options),
        chat=chat,
        placement=parse_placement(device, device_map),
    )
    try:
        evaluate(wanted, console())
    except KeyboardInterrupt:
        typer.echo("witcert: stopped; the same command goes on where it was", err=True)
        raise typer.Exit(INTERRUPTED) from None


def console() -> Console:
    """As wide as the terminal, or wide enough for a table in a file."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def split(text: str, brackets: bool = False) -> list[str]:
    """Comma-separated words. With `brackets`, `name:a=1,b=2` stays one: a word with = belongs to the one before, and so
    does `v=other` to `k=name`.
    """
    words: list[str] = []
    for word in (part.strip() for part in text.split(",")):
        goes_on = word.startswith("v=") or ("=" in word and ":" not in word and not word.startswith("k="))
        if brackets and words and goes_on:
            words[-1] += f",{word}"
        elif word:
            words.append(word)
    return words


def split_options(text: str) -> list[str]:
    """As a shell does."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of options: {error}") from error


def some(text: str, option: str) -> list[str]:
    """The words, at least one."""
    words = split(text)
    if not words:
        raise typer.BadParameter(f"{option} is {text!r}, which names none; leave it out or name some")
    return words


def parse_lengths(text: str) -> list[int]:
    """Positive numbers of tokens, at least one."""
    return [parse_length(word) for word in some(text, "--lengths")]


def parse_length(text: str) -> int:
    """A positive number of tokens."""
    if not text.isdecimal() or int(text) == 0:
        raise typer.BadParameter(f"{text!r} is no number of tokens")
    return int(text)


@app.command()
def coverage(
    model: RequiredModel,
    quantizers: Quantizers,
    out: Out,
    tasks: Tasks = "",
    lengths: Lengths = "1024",
    samples: Samples = 8,
    deltas: Annotated[str, typer.Option(help="Failure probabilities of a request, for dithered quantizers.")] = "",
    source: Source = "auto",
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    device_map: DeviceMap = None,
    chat: Chat = False,
    plot: Plot = True,
) -> None:
    """Share of cells that each form of the bound certifies on the same radii, over tau and delta, by layer and head."""
    from witcert_core.evaluate import analyses
    from witcert_core.evaluate.coverage import DELTAS

    specs = [parse_quantizer(name) for name in split(quantizers, brackets=True)]
    chosen = [parse_probability(text) for text in split(deltas)] or list(DELTAS)
    analyses.prepare(specs, out, plot=plot)
    inputs = open_inputs(model, dtype, source, tasks, lengths, samples, seed, chat, device, device_map)
    found = analyses.analyse_coverage(inputs, specs, chosen, console())
    analyses.write_coverage(found, out, console(), plot=plot)


def analyse(kind: Literal["trust", "layers"], text: str) -> None:
    """Add `witcert eval KIND`, whose help is `text`."""

    @app.command(kind, help=text)
    def command(
        model: RequiredModel,
        quantizers: Quantizers,
        out: Out,
        tasks: Tasks = "",
        lengths: Lengths = "1024",
        samples: Samples = 8,
        source: Source = "auto",
        seed: Seed = 0,
        dtype: Dtype = "auto",
        device: Device = None,
        device_map: DeviceMap = None,
        chat: Chat = False,
        plot: Plot = True,
    ) -> None:
        from witcert_core.evaluate import analyses

        specs = [parse_quantizer(name) for name in split(quantizers, brackets=True)]
        analyses.prepare(specs, out, plot=plot)
        inputs = open_inputs(model, dtype, source, tasks, lengths, samples, seed, chat, device, device_map)
        run, write = analyses.ANALYSES[kind]
        write(run(inputs, specs, console()), out, console(), plot=plot)


analyse(
    "trust", "How loose the bound is against the true TV, and how well its ranking finds the answers that are lost."
)
analyse(
    "layers", "Contaminate one layer at a time, then all, then growing runs from either end: answers lost, NLL, KL."
)


@app.command()
def drift(
    out: Out,
    model: Model = None,
    url: Annotated[
        str | None, typer.Option(help="A metered server (SGLang, vLLM) instead; it scores its own texts.")
    ] = None,
    quantizers: Quantizers = "",
    text: Annotated[Path | None, typer.Option(help="Text to score; without --prompts: Python's documentation.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Instead: prompts as for `witcert meter`, answered greedily from the exact cache."),
    ] = None,
    chat: Chat = False,
    samples: Annotated[int, typer.Option(min=1, help="Windows of the text, spread evenly.")] = 16,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a window before those that are scored.")] = 256,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens scored in a window, or written after a prompt.")] = 64,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    device_map: DeviceMap = None,
) -> None:
    """Measured, not bounded: KL to the exact cache's next token, likeliest tokens, log-perplexity, where texts part."""
    from witcert_core.evaluate.drift_run import DriftRun, evaluate
    from witcert_core.evaluate.offline.placement import parse_placement

    specs = [parse_quantizer(name) for name in split(quantizers, brackets=True)]
    placement = parse_placement(device, device_map)
    wanted = DriftRun(model, url, specs, out, text, prompts, chat, samples, context, tokens, seed, dtype, placement)
    evaluate(wanted, console())


@app.command()
def risk(
    model: RequiredModel,
    quantizers: Quantizers,
    out: Out,
    text: Annotated[Path | None, typer.Option(help="Text to go on with; without it: Python's documentation.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Windows of the text, spread evenly.")] = 32,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a window, which the exact cache goes on with.")] = 256,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens it writes after a window.")] = 32,
    tasks: Tasks = "",
    lengths: Lengths = "512",
    needles: Annotated[int, typer.Option(min=1, help="Samples of every task at every length.")] = 8,
    source: Source = "auto",
    seed: Seed = 0,
    dtype: Dtype = "auto",
    chat: Chat = False,
    device: Device = None,
    device_map: DeviceMap = None,
) -> None:
    """Which statistic of a request's meter says best how far its text drifts: chosen on one half, told of the other."""
    from witcert_core.evaluate.analyses import prepare
    from witcert_core.evaluate.risk_run import Prose, evaluate

    specs = [parse_quantizer(name) for name in split(quantizers, brackets=True)]
    prepare(specs, out, plot=False)
    inputs = open_inputs(model, dtype, source, tasks, lengths, needles, seed, chat, device, device_map)
    evaluate(inputs, specs, Prose(text, samples, context, tokens), out, console())


def open_inputs(
    model: str,
    dtype: str,
    source: str,
    tasks: str,
    lengths: str,
    samples: int,
    seed: int,
    chat: bool,
    device: str | None,
    device_map: str | None,
) -> Inputs:
    """The model and its samples, from what was written on the command line."""
    from witcert_core.evaluate.analyses import open_inputs as opened
    from witcert_core.evaluate.offline.placement import parse_placement

    return opened(
        model,
        dtype=dtype,
        source=source,
        tasks=split(tasks),
        lengths=parse_lengths(lengths),
        count=samples,
        seed=seed,
        chat=chat,
        placement=parse_placement(device, device_map),
    )


def parse_probability(text: str) -> float:
    """A number between 0 and 1, neither included."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise typer.BadParameter(f"{text!r} is no probability between 0 and 1")
    return value
