"""Make every figure and every table of measurements that README and docs show: ``make figures``.

Results go to ``docs/figures`` as JSON and SVG; ``bench/shown.py`` renders the tables from that JSON and puts them
into the pages. ``python bench/figures.py NAME ...`` makes some of them, ``--render`` only renders. Dither rows are
drawn anew by every run, so figures of dithered caches differ a little from one run to the next.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from shown import FIGURES, put_into_pages, read_results, render
from witcert_demo.run import CHECKPOINT, build_twin

from witcert_core.evaluate import analyses
from witcert_core.evaluate.capacity import DEFAULT_LAYOUTS, capacity, shape_of
from witcert_core.evaluate.coverage import SHOWN
from witcert_core.evaluate.plots import plot_comparison
from witcert_core.evaluate.records import write_json
from witcert_core.evaluate.ruler_run import RulerRun, evaluate
from witcert_core.evaluate.settings import MODES, parse_quantizer
from witcert_core.hooks import quantizer_registry

QUANTIZERS = ("fp8_e4m3_cast", "int4_token_group", "int8_dither")
COMPARED = ("fp8_e4m3_cast", "fp8_calibrated", "int4_token_group", "nvfp4", "kivi:bits=4", "kvquant", "rotated")
COMPARED += ("int8_dither",)
COVERED = ("int8_dither", "int8_dither_w", "int8_token_group", "int4_token_group", "int4_token_group@4")
TRUSTED = (*QUANTIZERS, "int4_token_group@4")
NUM_TOKENS, SEED = 512, 11
PER_TASK, PER_TASK_COVERAGE, PER_TASK_TRUST, PER_TASK_LAYERS = 8, 3, 16, 6
DELTAS = (1e-1, 1e-2, 1e-4, 1e-6)
EIGHT_B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
MEMORY = 40 * 10**9

Models = Mapping[str, str]


def make_ruler(models: Models, console: Console) -> dict[str, Any]:
    """Answers of the twin: raw, gated, exact; bytes of a token and KV head at head_dim 128."""
    specs = [parse_quantizer(name) for name in COMPARED]
    with tempfile.TemporaryDirectory() as scratch:
        wanted = RulerRun(
            model=models["twin"],
            url=None,
            quantizers=specs,
            modes=MODES,
            tasks=(),
            lengths=(NUM_TOKENS // 2,),
            samples=PER_TASK,
            out=Path(scratch),
            seed=SEED,
            plot=False,
        )
        found = evaluate(wanted, console)
    quantizers = {spec.label: quantizer_registry().get(spec.name, spec.params) for spec in specs}
    return {**found, "bytes": {label: made.bytes_per_token_head(128) for label, made in quantizers.items()}}


def make_coverage(models: Models, console: Console) -> dict[str, Any]:
    """Bounds on the same radii, of the original and of the twin."""
    found: dict[str, Any] = {}
    for name, path in models.items():
        inputs = inputs_of(path, PER_TASK_COVERAGE)
        specs = [parse_quantizer(quantizer) for quantizer in COVERED]
        result = analyses.analyse_coverage(inputs, specs, DELTAS if name == "twin" else DELTAS[1:2], console)
        if name == "twin":
            analyses.write_coverage(result, FIGURES, console, plot=True)
        for measured in result["quantizers"].values():  # what is drawn or shown
            measured["by_tau"] = {
                tier: {form: forms[form] for form in SHOWN}
                for tier, forms in measured["by_tau"].items()
                if tier in ("witness", "0.01")
            }
            measured["by_layer_head"] = {"witness": {f: measured["by_layer_head"]["witness"][f] for f in SHOWN}}
        found[name] = result
    return found


def make_trust(models: Models, console: Console) -> dict[str, Any]:
    """Bound against truth, and the ranking, on the twin."""
    result = analyses.analyse_trust(
        inputs_of(models["twin"], PER_TASK_TRUST), [parse_quantizer(name) for name in TRUSTED], console
    )
    analyses.write_trust(result, FIGURES, console, plot=True)
    for measured in result["quantizers"].values():
        del measured["points"]
    return result


def make_layers(models: Models, console: Console) -> dict[str, Any]:
    """One layer at a time, all, prefixes, on the twin."""
    inputs = inputs_of(models["twin"], PER_TASK_LAYERS)
    result = analyses.analyse_layers(inputs, [parse_quantizer(name) for name in QUANTIZERS], console)
    analyses.write_layers(result, FIGURES, console, plot=True)
    return result


def make_capacity(_models: Models, _console: Console) -> dict[str, Any]:
    """An 8-billion-parameter Llama in 40 GB."""
    shape = shape_of(EIGHT_B, "8B")
    rows = [asdict(capacity(layout, shape, MEMORY)) for layout in DEFAULT_LAYOUTS]
    return {"memory": MEMORY, "config": EIGHT_B, "rows": rows}


def make_smoke(models: Models, console: Console) -> dict[str, Any]:
    """Little enough to be made again by a test, with deterministic quantizers only."""
    inputs = inputs_of(models["twin"], 1, num_tokens=96)
    found = analyses.analyse_coverage(inputs, [parse_quantizer("int8_token_group")], (), console)
    result = found["quantizers"]["int8_token_group"]
    layers = analyses.analyse_layers(inputs, [parse_quantizer("int4_token_group")], console)
    rows = layers["quantizers"]["int4_token_group"]["rows"]
    return {
        "cells": result["cells"],
        "violations": result["violations"],
        "at_tau": result["at_tau"]["witness"],
        "over_extremal": result["over_extremal"]["witness"],
        "kl": {row["setting"]: row["kl"]["value"] for row in rows},
    }


MAKERS: dict[str, Callable[[Models, Console], dict[str, Any]]] = {
    "capacity": make_capacity,
    "smoke": make_smoke,
    "coverage": make_coverage,
    "layers": make_layers,
    "trust": make_trust,
    "ruler": make_ruler,
}


def inputs_of(model: str, count: int, num_tokens: int = NUM_TOKENS) -> analyses.Inputs:
    """`count` samples of every needle task."""
    return analyses.open_inputs(
        model, dtype="float32", source="needles", tasks=(), lengths=(num_tokens,), count=count, seed=SEED
    )


def made_with() -> dict[str, str]:
    """What the figures depend on beside this repository."""
    return {name: version(name) for name in ("torch", "transformers")} | {"machine": platform.machine()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MAKERS)}; none: all")
    parser.add_argument("--render", action="store_true", help="measure nothing, only renew the pages")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in MAKERS]
    if unknown:
        parser.error(f"no figure is called {unknown[0]!r}; there are {', '.join(MAKERS)}")
    FIGURES.mkdir(exist_ok=True)
    console = Console(width=200)
    with tempfile.TemporaryDirectory() as scratch:
        models = {"original": str(CHECKPOINT), "twin": str(build_twin(Path(scratch) / "twin"))}
        for name in [] if options.render else options.names or MAKERS:
            result = MAKERS[name](models, console)
            write_json(FIGURES / f"{name}.json", {"made_with": made_with(), **result})
    for leftover in FIGURES.glob("*.md"):
        leftover.unlink()
    results = read_results()
    plot_comparison(results["ruler"], FIGURES / "ruler.svg")
    blocks = render(results)
    write_json(FIGURES / "figures.json", {"blocks": blocks})
    put_into_pages(blocks)
    print(json.dumps(sorted(blocks)), file=sys.stderr)


if __name__ == "__main__":
    main()
