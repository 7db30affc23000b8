"""The sections of `bench/figures.py` measured on the demonstration's small retrieval model and its outlier twin.

They show the method where compute is scarce; what a real model does is in `bench/real.py`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.real import QUANTIZERS, TRUSTED, Models, drawn_or_shown
from witcert_core.evaluate import analyses
from witcert_core.evaluate.capacity import DEFAULT_LAYOUTS, capacity
from witcert_core.evaluate.plots import plot_comparison
from witcert_core.evaluate.ruler_run import RulerRun, evaluate
from witcert_core.evaluate.settings import MODES, parse_quantizer
from witcert_core.policy.plugins import quantizer_registry
from witcert_core.serving.models.attention import describe

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
NUM_TOKENS, SEED = 512, 11
PER_TASK, PER_TASK_COVERAGE, PER_TASK_TRUST, PER_TASK_LAYERS = 24, 6, 32, 24
DELTAS = (1e-1, 1e-2, 1e-4, 1e-6)
EIGHT_B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
MEMORY = 40 * 10**9


def make_ruler(models: Models, console: Console, out: Path, size: int) -> dict[str, Any]:
    """Answers of the twin: raw, gated, exact; bytes of a token and KV head at head_dim 128."""
    specs = [parse_quantizer(name) for name in COMPARED]
    wanted = RulerRun(
        model=models["twin"],
        url=None,
        quantizers=specs,
        modes=MODES,
        tasks=(),
        lengths=(NUM_TOKENS // 2,),
        samples=size * PER_TASK,
        out=out,
        seed=SEED,
        plot=False,
    )
    found = evaluate(wanted, console)
    plot_comparison(found, out / "ruler.svg")
    quantizers = {spec.label: quantizer_registry().get(spec.name, spec.params) for spec in specs}
    return {**found, "bytes": {label: made.bytes_per_token_head(128) for label, made in quantizers.items()}}


def make_coverage(models: Models, console: Console, out: Path, size: int) -> dict[str, Any]:
    """Bounds on the same radii, of the original and of the twin."""
    found: dict[str, Any] = {}
    for name, path in models.items():
        inputs = inputs_of(path, size * PER_TASK_COVERAGE)
        specs = [parse_quantizer(quantizer) for quantizer in COVERED]
        result = analyses.analyse_coverage(inputs, specs, DELTAS if name == "twin" else DELTAS[1:2], console)
        if name == "twin":
            analyses.write_coverage(result, out, console, plot=True)
        found[name] = drawn_or_shown(result)
    return found


def make_trust(models: Models, console: Console, out: Path, size: int) -> dict[str, Any]:
    """Bound against truth, and the ranking, on the twin."""
    result = analyses.analyse_trust(
        inputs_of(models["twin"], size * PER_TASK_TRUST), [parse_quantizer(name) for name in TRUSTED], console
    )
    analyses.write_trust(result, out, console, plot=True)
    for measured in result["quantizers"].values():
        del measured["points"]
    return result


def make_layers(models: Models, console: Console, out: Path, size: int) -> dict[str, Any]:
    """One layer at a time, all, prefixes, on the twin."""
    inputs = inputs_of(models["twin"], size * PER_TASK_LAYERS)
    result = analyses.analyse_layers(inputs, [parse_quantizer(name) for name in QUANTIZERS], console)
    analyses.write_layers(result, out, console, plot=True)
    return result


def make_capacity(_models: Models, _console: Console, _out: Path, _size: int) -> dict[str, Any]:
    """An 8-billion-parameter Llama in 40 GB."""
    shape = describe(EIGHT_B, "8B")
    rows = [asdict(capacity(layout, shape, MEMORY)) for layout in DEFAULT_LAYOUTS]
    return {"memory": MEMORY, "config": EIGHT_B, "rows": rows}


def make_smoke(models: Models, console: Console, _out: Path, _size: int) -> dict[str, Any]:
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


def inputs_of(model: str, count: int, num_tokens: int = NUM_TOKENS) -> analyses.Inputs:
    """`count` samples of every needle task."""
    return analyses.open_inputs(
        model, dtype="float32", source="needles", tasks=(), lengths=(num_tokens,), count=count, seed=SEED
    )


MAKERS = {
    "tiny_ruler": make_ruler,
    "tiny_trust": make_trust,
    "tiny_coverage": make_coverage,
    "tiny_layers": make_layers,
    "smoke": make_smoke,
    "capacity": make_capacity,
}
