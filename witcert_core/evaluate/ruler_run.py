"""`witcert eval ruler`: ask, compare, write everything down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from witcert_core.errors import InputError
from witcert_core.evaluate.askers import Asker, OfflineAsker, UrlAsker
from witcert_core.evaluate.campaign import Plan, run
from witcert_core.evaluate.compare import compare
from witcert_core.evaluate.extras import require
from witcert_core.evaluate.offline.model import load_model, load_tokenizer
from witcert_core.evaluate.offline.placement import HOST, Placement
from witcert_core.evaluate.plots import plot_comparison
from witcert_core.evaluate.records import RecordFile, make_directory, write_json
from witcert_core.evaluate.served import ServedAsker
from witcert_core.evaluate.servers import ending_signals_raised
from witcert_core.evaluate.settings import EXACT, MODES, Mode, QuantizerSpec, base_settings
from witcert_core.evaluate.stats import RESAMPLES
from witcert_core.evaluate.tables import COMPARISON_COLUMNS, comparison_rows, markdown_table, rich_table
from witcert_core.evaluate.task_registry import choose_source, choose_tasks

ROOM_FOR_ANSWERS = 256
"""Slots beside the prompt: special tokens, and the longest answer a task asks for."""


@dataclass(frozen=True)
class RulerRun:
    """What `witcert eval ruler` was asked to do: `model` in an engine, or `url`, a running server.

    engine: `offline`, or `sglang` or `vllm`, started with `server_options` for each quantizer and mode. stride,
    audit_every: of the meter; None for those of the policy, or 1 without one. dtype: of the model; `auto`, its own.
    chat: questions are put into the model's chat template.
    """

    model: str | None
    url: str | None
    quantizers: Sequence[QuantizerSpec]
    modes: Sequence[Mode]
    tasks: Sequence[str]
    lengths: Sequence[int]
    samples: int
    out: Path
    source: str = "auto"
    seed: int = 0
    policy: Path | None = None
    dtype: str = "auto"
    stride: int | None = None
    audit_every: int | None = None
    parallel: int = 4
    plot: bool = True
    engine: str = "offline"
    server_options: Sequence[str] = ()
    chat: bool = False
    placement: Placement = HOST


def evaluate(wanted: RulerRun, console: Console) -> dict[str, Any]:
    """Ask what is missing and return the comparison, which is also in `out` as JSON, Markdown and SVG."""
    if wanted.plot:
        require("matplotlib")
    make_directory(wanted.out)
    askers, tokenizer, name = _open(wanted)
    source = choose_source(wanted.source, tokenizer)
    plan = Plan(source, choose_tasks(source, wanted.tasks), tuple(wanted.lengths), wanted.samples, wanted.seed)
    about = {"model": name, "source": source.name, "seed": wanted.seed}
    file = RecordFile(wanted.out, about)
    try:
        with ending_signals_raised():  # so that a server that was started is stopped
            run(plan, askers, tokenizer, file, console)
    finally:
        file.close()
    comparison = compare(file.records, about, resamples=RESAMPLES, seed=wanted.seed)
    write_comparison(comparison, wanted.out, plot=wanted.plot)
    console.print(rich_table(f"{name}: {source.name} tasks", COMPARISON_COLUMNS, comparison_rows(comparison)))
    return comparison


def write_comparison(comparison: dict[str, Any], out: Path, *, plot: bool) -> None:
    """`results.json`, `results.md` and `results.svg`."""
    write_json(out / "results.json", comparison)
    table = markdown_table(COMPARISON_COLUMNS, comparison_rows(comparison))
    (out / "results.md").write_text(table + "\n", encoding="utf-8")
    if plot:
        plot_comparison(comparison, out / "results.svg")


def _open(wanted: RulerRun) -> tuple[list[Asker], Any, str]:
    """Who is asked, the tokenizer that measures lengths, and what the model is called."""
    refuse_what_would_be_ignored(wanted)
    if wanted.url is not None:
        server = UrlAsker(wanted.url, wanted.parallel, wanted.chat)
        path = wanted.model or server.model_path
        return [server], load_tokenizer(path), Path(path).name
    if wanted.model is None:
        raise InputError("neither --model nor --url is given; one of them says what is evaluated")
    if not wanted.quantizers and set(wanted.modes) != {"exact"}:
        raise InputError("no quantizer is named; --quantizers takes names, `witcert quantizers` lists them")
    base = base_settings(wanted.policy, stride=wanted.stride, audit_every=wanted.audit_every)
    runs = runs_of(wanted.quantizers, wanted.modes)
    askers: list[Asker] = []
    if wanted.engine == "offline":
        loaded = load_model(wanted.model, wanted.dtype, chat=wanted.chat, placement=wanted.placement)
        loaded.check_lengths(wanted.lengths)
        room = max(wanted.lengths) + ROOM_FOR_ANSWERS
        askers += [OfflineAsker(loaded, base, spec, mode, room) for spec, mode in runs]
        return askers, loaded.tokenizer, loaded.name
    askers += [
        ServedAsker(
            wanted.engine,
            wanted.model,
            base,
            spec,
            mode,
            dtype=wanted.dtype,
            options=wanted.server_options,
            logs=wanted.out,
            parallel=wanted.parallel,
            chat=wanted.chat,
        )
        for spec, mode in runs
    ]
    return askers, load_tokenizer(wanted.model), Path(wanted.model).name


def refuse_what_would_be_ignored(wanted: RulerRun) -> None:
    """InputError for an option that means nothing beside the others."""
    of_a_start = {
        "--quantizers": wanted.quantizers,
        "--policy": wanted.policy,
        "--stride": wanted.stride,
        "--audit-every": wanted.audit_every is not None,
        "--dtype": wanted.dtype != "auto",
        "--engine": wanted.engine != "offline",
        "--server-options": wanted.server_options,
        "--device": wanted.placement.about,
    }
    given = [name for name, value in of_a_start.items() if value]
    if wanted.url is not None and given:
        raise InputError(f"{given[0]} says how a model is run, but what is at --url runs already; leave one out")
    if wanted.engine == "offline" and wanted.server_options:
        raise InputError("--server-options are for servers that are started: add --engine sglang or --engine vllm")
    if wanted.engine != "offline" and wanted.placement.about:
        raise InputError("--device and --device-map are for --engine offline; tell a server by --server-options")


def runs_of(specs: Sequence[QuantizerSpec], modes: Sequence[Mode]) -> list[tuple[QuantizerSpec, Mode]]:
    """Every quantizer in every mode; `exact` once, whatever the quantizers."""
    exact = [QuantizerSpec(EXACT, EXACT, {})]
    return [(spec, mode) for mode in MODES if mode in modes for spec in (exact if mode == "exact" else specs)]
