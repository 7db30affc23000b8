"""Make every figure and every table of measurements that README and docs show: ``make figures``.

Results go to ``docs/figures`` as JSON and SVG; ``bench/shown.py`` renders the tables from that JSON and puts them
into the pages. ``--only NAME`` makes one section (may be given again), ``--render`` only renders, which is also what a
new ``bench/sglang/results.json`` or ``bench/vllm/results.json`` needs. Finished sections wait in ``.cache/figures``
until all of a run are there, so a run that was stopped goes on where it was; ``--fresh`` begins anew, as does a change
of the code or of PyTorch. Dither rows are drawn anew by every run, so figures of dithered caches differ a little from
one run to the next.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from witcert_demo.run import CHECKPOINT, build_twin

from bench.shown import FIGURES, ROOT, put_into_pages, read_results, render
from witcert_core.evaluate import analyses
from witcert_core.evaluate.capacity import DEFAULT_LAYOUTS, capacity
from witcert_core.evaluate.coverage import SHOWN
from witcert_core.evaluate.plots import plot_comparison
from witcert_core.evaluate.records import write_json
from witcert_core.evaluate.ruler_run import RulerRun, evaluate
from witcert_core.evaluate.settings import MODES, parse_quantizer
from witcert_core.policy.plugins import quantizer_registry
from witcert_core.serving.models.attention import describe

WORK = ROOT / ".cache" / "figures"
QUANTIZERS = ("fp8_e4m3_cast", "int4_token_group", "int8_dither")
COMPARED = (
    "fp8_e4m3_cast",
    "fp8_calibrated",
    "int4_token_group",
    "nvfp4",
    "kivi:bits=4",
    "kvquant",
    "rotated",
    "int8_dither",
)
COVERED = ("int8_dither", "int8_dither_w", "int8_token_group", "int4_token_group", "int4_token_group@4")
TRUSTED = (*QUANTIZERS, "int4_token_group@4")
NUM_TOKENS, SEED = 512, 11
PER_TASK, PER_TASK_COVERAGE, PER_TASK_TRUST, PER_TASK_LAYERS = 24, 6, 32, 24
DELTAS = (1e-1, 1e-2, 1e-4, 1e-6)
EIGHT_B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
MEMORY = 40 * 10**9

Models = Mapping[str, str]


def make_ruler(models: Models, console: Console, out: Path) -> dict[str, Any]:
    """Answers of the twin: raw, gated, exact; bytes of a token and KV head at head_dim 128."""
    specs = [parse_quantizer(name) for name in COMPARED]
    wanted = RulerRun(
        model=models["twin"],
        url=None,
        quantizers=specs,
        modes=MODES,
        tasks=(),
        lengths=(NUM_TOKENS // 2,),
        samples=PER_TASK,
        out=out,
        seed=SEED,
        plot=False,
    )
    found = evaluate(wanted, console)
    plot_comparison(found, out / "ruler.svg")
    quantizers = {spec.label: quantizer_registry().get(spec.name, spec.params) for spec in specs}
    return {**found, "bytes": {label: made.bytes_per_token_head(128) for label, made in quantizers.items()}}


def make_coverage(models: Models, console: Console, out: Path) -> dict[str, Any]:
    """Bounds on the same radii, of the original and of the twin."""
    found: dict[str, Any] = {}
    for name, path in models.items():
        inputs = inputs_of(path, PER_TASK_COVERAGE)
        specs = [parse_quantizer(quantizer) for quantizer in COVERED]
        result = analyses.analyse_coverage(inputs, specs, DELTAS if name == "twin" else DELTAS[1:2], console)
        if name == "twin":
            analyses.write_coverage(result, out, console, plot=True)
        for measured in result["quantizers"].values():  # what is drawn or shown
            measured["by_tau"] = {
                tier: {form: forms[form] for form in SHOWN}
                for tier, forms in measured["by_tau"].items()
                if tier in ("deterministic", "0.01")
            }
            measured["by_layer_head"] = {
                "deterministic": {f: measured["by_layer_head"]["deterministic"][f] for f in SHOWN}
            }
        found[name] = result
    return found


def make_trust(models: Models, console: Console, out: Path) -> dict[str, Any]:
    """Bound against truth, and the ranking, on the twin."""
    result = analyses.analyse_trust(
        inputs_of(models["twin"], PER_TASK_TRUST), [parse_quantizer(name) for name in TRUSTED], console
    )
    analyses.write_trust(result, out, console, plot=True)
    for measured in result["quantizers"].values():
        del measured["points"]
    return result


def make_layers(models: Models, console: Console, out: Path) -> dict[str, Any]:
    """One layer at a time, all, prefixes, on the twin."""
    inputs = inputs_of(models["twin"], PER_TASK_LAYERS)
    result = analyses.analyse_layers(inputs, [parse_quantizer(name) for name in QUANTIZERS], console)
    analyses.write_layers(result, out, console, plot=True)
    return result


def make_capacity(_models: Models, _console: Console, _out: Path) -> dict[str, Any]:
    """An 8-billion-parameter Llama in 40 GB."""
    shape = describe(EIGHT_B, "8B")
    rows = [asdict(capacity(layout, shape, MEMORY)) for layout in DEFAULT_LAYOUTS]
    return {"memory": MEMORY, "config": EIGHT_B, "rows": rows}


def make_smoke(models: Models, console: Console, _out: Path) -> dict[str, Any]:
    """Little enough to be made again by a test, with deterministic quantizers only."""
    inputs = inputs_of(models["twin"], 1, num_tokens=96)
    found = analyses.analyse_coverage(inputs, [parse_quantizer("int8_token_group")], (), console)
    result = found["quantizers"]["int8_token_group"]
    layers = analyses.analyse_layers(inputs, [parse_quantizer("int4_token_group")], console)
    rows = layers["quantizers"]["int4_token_group"]["rows"]
    return {
        "cells": result["cells"],
        "violations": result["violations"],
        "at_tau": result["at_tau"]["deterministic"],
        "over_extremal": result["over_extremal"]["deterministic"],
        "kl": {row["setting"]: row["kl"]["value"] for row in rows},
    }


MAKERS: dict[str, Callable[[Models, Console, Path], dict[str, Any]]] = {
    "ruler": make_ruler,
    "trust": make_trust,
    "coverage": make_coverage,
    "layers": make_layers,
    "smoke": make_smoke,
    "capacity": make_capacity,
}
"""The longest first."""


def inputs_of(model: str, count: int, num_tokens: int = NUM_TOKENS) -> analyses.Inputs:
    """`count` samples of every needle task."""
    return analyses.open_inputs(
        model, dtype="float32", source="needles", tasks=(), lengths=(num_tokens,), count=count, seed=SEED
    )


def made_with() -> dict[str, str]:
    """What the figures depend on beside this repository."""
    return {name: version(name) for name in ("torch", "transformers")} | {"machine": platform.machine()}


def code_stamp() -> str:
    """A hash of all that decides the figures: a section made by other code is not taken over."""
    folders = [ROOT / "witcert_core", ROOT / "demo" / "witcert_demo", *sorted((ROOT / "plugins").glob("*/witcert_*"))]
    files = [Path(__file__).resolve(), CHECKPOINT / "model.safetensors"]
    files += [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    digest = hashlib.sha256(json.dumps(made_with()).encode())
    for path in files:
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def open_work(fresh: bool) -> list[str]:
    """The folder of unfinished runs, emptied where `fresh` or other code wrote it; returns the finished sections."""
    stamp = WORK / "stamp"
    if fresh or not stamp.exists() or stamp.read_text() != code_stamp():
        shutil.rmtree(WORK, ignore_errors=True)
        WORK.mkdir(parents=True)
        stamp.write_text(code_stamp())
    return [name for name in MAKERS if (WORK / f"{name}.json").exists()]


def make_section(name: str) -> None:
    """Measure one section, in a process of its own. NAME.json beside the folder of the section says that it is done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends this process
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        models = {"original": str(CHECKPOINT), "twin": str(build_twin(Path(scratch) / "twin"))}
        folder = WORK / name
        folder.mkdir(exist_ok=True)
        result = MAKERS[name](models, Console(quiet=True), folder)
    part = folder / "part"
    write_json(part, {"made_with": made_with(), **result})
    part.replace(WORK / f"{name}.json")


def make_all(names: Sequence[str], jobs: int) -> None:
    """Sections side by side, a line when one begins and ends; SystemExit names one that failed."""
    context = get_context("spawn")
    running: dict[str, tuple[Any, float]] = {}
    waiting, done = list(names), 0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                process = context.Process(target=make_section, args=(name,), daemon=True)
                process.start()
                running[name] = process, time.monotonic()
                say(f"{name}: begun")
            time.sleep(0.2)
            for name, (process, begun) in list(running.items()):
                if process.exitcode is None:
                    continue
                del running[name]
                if process.exitcode:
                    raise SystemExit(f"{name} failed (above); the finished sections are kept for the next run")
                done += 1
                say(f"{name}: done after {(time.monotonic() - begun) / 60:.1f} minutes ({done} of {len(names)})")
    finally:
        for process, _ in running.values():
            process.terminate()
            process.join()


def publish(names: Sequence[str]) -> None:
    """Move what was measured and drawn to where README and docs look for it."""
    FIGURES.mkdir(exist_ok=True)
    for name in names:
        for path in (*(WORK / name).glob("*.svg"), WORK / f"{name}.json"):
            shutil.move(path, FIGURES / path.name)
        shutil.rmtree(WORK / name)


def renew_pages() -> None:
    """Render all results and put them where README and docs show them."""
    blocks = render(read_results())
    write_json(FIGURES / "figures.json", {"blocks": blocks})
    put_into_pages(blocks)
    say(f"rendered: {', '.join(sorted(blocks))}")


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=tuple(MAKERS), help="make this section; may be given again")
    parser.add_argument("--render", action="store_true", help="measure nothing, only renew the pages")
    parser.add_argument("--fresh", action="store_true", help="take nothing over from a run that was stopped")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="sections at once (default 2)")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; it must be at least 1")
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    if not options.render:
        names = [name for name in MAKERS if name in (options.only or MAKERS)]
        finished = [name for name in open_work(options.fresh) if name in names]
        if finished:
            say(f"taken over from a run that was stopped: {', '.join(finished)}")
        try:
            make_all([name for name in names if name not in finished], options.jobs)
        except KeyboardInterrupt:
            say("stopped; the same command goes on where it was")
            return 130
        publish(names)
    renew_pages()
    return 0


if __name__ == "__main__":
    sys.exit(main())
