"""The analyses of one model: coverage of the bounds, calibration, layers. Each writes JSON, a table and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from witcert_core.errors import InputError
from witcert_core.evaluate import coverage, sweep, trust
from witcert_core.evaluate.extras import require
from witcert_core.evaluate.forcing import (
    ForcedSample,
    collect,
    force,
    forced_samples,
    hasty_policy,
    measuring_policy,
    room,
)
from witcert_core.evaluate.offline.engine import OfflineEngine
from witcert_core.evaluate.offline.model import LoadedModel, load_model
from witcert_core.evaluate.offline.placement import HOST, Placement
from witcert_core.evaluate.progress import progress
from witcert_core.evaluate.records import make_directory, write_json
from witcert_core.evaluate.settings import QuantizerSpec
from witcert_core.evaluate.stats import RESAMPLES
from witcert_core.evaluate.tables import markdown_table, rich_table
from witcert_core.evaluate.task_registry import choose_source, choose_tasks


@dataclass(frozen=True)
class Inputs:
    """A loaded model and the samples whose answers are fed in."""

    loaded: LoadedModel
    samples: Sequence[ForcedSample]
    about: Mapping[str, Any]
    seed: int

    @property
    def options(self) -> dict[str, int]:
        """Of the bootstrap."""
        return {"resamples": RESAMPLES, "seed": self.seed}


def open_inputs(
    model: str,
    *,
    dtype: str,
    source: str,
    tasks: Sequence[str],
    lengths: Sequence[int],
    count: int,
    seed: int,
    chat: bool = False,
    placement: Placement = HOST,
) -> Inputs:
    """Load the model and make its samples; chat: they are put into its chat template."""
    loaded = load_model(model, dtype, chat=chat, placement=placement)
    chosen = choose_source(source, loaded.tokenizer)
    names = choose_tasks(chosen, tasks)
    loaded.check_lengths(lengths)
    samples = forced_samples(loaded, chosen, names, lengths, count, seed)
    about: dict[str, Any] = {
        "model": loaded.name,
        "source": chosen.name,
        "tasks": list(names),
        "lengths": list(lengths),
    }
    if chat:
        about["chat"] = True
    about |= placement.about
    return Inputs(loaded, samples, {**about, "samples": count, "seed": seed}, seed)


def analyse_coverage(
    inputs: Inputs, specs: Sequence[QuantizerSpec], deltas: Sequence[float], console: Console
) -> dict[str, Any]:
    """Coverage of every form, by quantizer (schema witcert.coverage/1)."""
    model = inputs.loaded.shape
    results = {}
    with progress(console) as shown:
        bar = shown.add_task("coverage", total=len(specs))
        for spec in specs:
            table, _ = collect(inputs.loaded, spec, inputs.samples, deltas)
            results[spec.label] = coverage.coverage_of(table, len(model.layers), model.num_qo_heads)
            shown.advance(bar)
    return {"schema": coverage.SCHEMA, "about": dict(inputs.about), "taus": list(coverage.TAUS), "quantizers": results}


def analyse_trust(inputs: Inputs, specs: Sequence[QuantizerSpec], console: Console) -> dict[str, Any]:
    """Calibration of the bound and of the ranking, by quantizer (schema witcert.trust/1)."""
    samples = inputs.samples
    engine = OfflineEngine(inputs.loaded, hasty_policy(specs[0], ()), room(samples))
    exact, results, parts = [], {}, []
    with progress(console) as shown:
        bar = shown.add_task("exact answers", total=len(samples))
        for i, sample in enumerate(samples):
            exact.append(force(engine, sample, f"sample-{i}"))
            shown.advance(bar)
        bar = shown.add_task("trust", total=len(specs))
        for spec in specs:
            table, outcomes = collect(inputs.loaded, spec, samples, ())
            results[spec.label] = trust.trust_of(table, outcomes, exact, inputs.options)
            parts.append((table, outcomes))
            shown.advance(bar)
    about = {**inputs.about, "exact_right": sum(outcome.right for outcome in exact)}
    every = trust.pooled(parts, exact, inputs.options)
    return {"schema": trust.SCHEMA, "about": about, "quantizers": results, "pooled": every}


def analyse_layers(inputs: Inputs, specs: Sequence[QuantizerSpec], console: Console) -> dict[str, Any]:
    """The sweep of layers, by quantizer (schema witcert.sweep/1)."""
    results = {}
    with progress(console) as shown:
        for spec in specs:
            total = 1 + len(sweep.settings(len(inputs.loaded.shape.layers)))
            bar = shown.add_task(spec.label, total=total)
            done = partial(shown.advance, bar)
            results[spec.label] = sweep.sweep(inputs.loaded, spec, inputs.samples, inputs.options, done)
    return {"schema": sweep.SCHEMA, "about": dict(inputs.about), "quantizers": results}


def write_coverage(found: Mapping[str, Any], out: Path, console: Console, *, plot: bool) -> None:
    """`coverage.json`, `.md`, and figures over tau, over delta and by layer and head."""
    results = found["quantizers"]
    write_table(found, "coverage", coverage.COVERAGE_COLUMNS, coverage.coverage_rows(results), out, console)
    if plot:
        coverage.plot_coverage(results, out / "coverage.svg")
        coverage.plot_deltas(results, out / "coverage_delta.svg")
        coverage.plot_heads(results, out / "coverage_heads.svg")


def write_trust(found: Mapping[str, Any], out: Path, console: Console, *, plot: bool) -> None:
    """`trust.json`, `.md` and `.svg`."""
    write_table(found, "trust", trust.TRUST_COLUMNS, trust.trust_rows(found), out, console)
    if plot:
        trust.plot_trust(found["quantizers"], out / "trust.svg")


def write_layers(found: Mapping[str, Any], out: Path, console: Console, *, plot: bool) -> None:
    """`layers.json`, `.md` and `.svg`."""
    rows = [[name, *row] for name, result in found["quantizers"].items() for row in sweep.sweep_rows(result)]
    write_table(found, "layers", ("KV cache", *sweep.SWEEP_COLUMNS), rows, out, console)
    if plot:
        sweep.plot_sweep(found["quantizers"], out / "layers.svg")


def prepare(specs: Sequence[QuantizerSpec], out: Path, *, plot: bool) -> None:
    """Find out before hours of work that a quantizer is wrong, or that results cannot be written or drawn."""
    if not specs:
        raise InputError("no quantizer is named; --quantizers takes names, `witcert quantizers` lists them")
    for spec in specs:
        measuring_policy(spec)
    if plot:
        require("matplotlib")
    make_directory(out)


def write_table(
    found: Mapping[str, Any], name: str, columns: Sequence[str], rows: list[list[str]], out: Path, console: Console
) -> None:
    """What was found as `NAME.json`, and its rows as `NAME.md` and on the console."""
    write_json(out / f"{name}.json", found)
    (out / f"{name}.md").write_text(markdown_table(columns, rows) + "\n", encoding="utf-8")
    console.print(rich_table(f"{found['about']['model']}: {name}", columns, rows))


ANALYSES = {"trust": (analyse_trust, write_trust), "layers": (analyse_layers, write_layers)}
"""Those that take nothing but quantizers and samples, by the name of their command."""
