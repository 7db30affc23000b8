"""The sections of `bench/figures.py` measured on a real chat model of 30 layers, SmolLM2-135M-Instruct, and its twin.

Compute is what there is little of: `size` multiplies every number of samples. Every result says its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from witcert_core.evaluate import analyses, risk
from witcert_core.evaluate.coverage import SHOWN
from witcert_core.evaluate.drift import NATURAL, drift, natural_text, windows
from witcert_core.evaluate.offline.model import load_model
from witcert_core.evaluate.records import write_json
from witcert_core.evaluate.ruler_run import RulerRun, evaluate
from witcert_core.evaluate.settings import Mode, parse_quantizer
from witcert_core.evaluate.stats import RESAMPLES

Models = Mapping[str, str]
QUANTIZERS = ("fp8_e4m3_cast", "int4_token_group", "int8_dither")
EVERY = (
    "int8_token_group",
    "int8_dither",
    "int8_dither_w",
    "fp8_e4m3_cast",
    "fp8_e5m2_cast",
    "fp8_calibrated",
    "int4_token_group",
    "nvfp4",
    "kivi:bits=4",
    "kivi",
    "kvquant",
    "kvquant:bits=2",
    "rotated",
    "skvq:bits=4",
    "skvq",
    "int2_token_group",
)
"""All that can be simulated offline, plugins at the bits of their papers."""
RANKED = (
    "int8_dither",
    "fp8_e4m3_cast",
    "fp8_calibrated",
    "int4_token_group",
    "int4_token_group@4",
    "nvfp4",
    "kivi:bits=4",
    "kivi",
    "kvquant",
    "rotated",
    "skvq:bits=4",
)
COVERED = ("int8_dither", "fp8_calibrated")
TRUSTED = (*QUANTIZERS, "int4_token_group@4")
NEEDLES = ("single_needle", "multi_key")
FAMILIES = (*NEEDLES, "multi_value", "variable_tracking", "frequent_words", "question_answering")
"""Of RULER, without the two that this model answers by writing on until it is stopped."""
RANKED_SAMPLES: Mapping[str, tuple[int, int]] = {"original": (28, 10)}
"""By model: windows of prose, and samples of each needle task."""
SEED, NUM_TOKENS = 11, 512
DELTA = 1e-2
STRIDE = 8
"""Of the meter where it is only looked at beside answers or drift."""
ASKED: Mapping[int, Sequence[str]] = {512: FAMILIES, 1024: FAMILIES, 4096: NEEDLES}
"""Families by length; a sample of each, times `size`."""


def inputs_of(model: str, count: int) -> analyses.Inputs:
    """`count` samples of each needle task."""
    return analyses.open_inputs(
        model, dtype="float32", source="natural", tasks=NEEDLES, lengths=(NUM_TOKENS,), count=count, seed=SEED
    )


def ask(
    model: str, quantizers: Sequence[str], modes: Sequence[Mode], length: int, count: int, out: Path, **more: Any
) -> dict[str, Any]:
    """The comparison of quantizers on RULER's families at one length."""
    wanted = RulerRun(
        model=model,
        url=None,
        quantizers=[parse_quantizer(name) for name in quantizers],
        modes=modes,
        tasks=more.pop("tasks", ()),
        lengths=(length,),
        samples=count,
        out=out,
        source="natural",
        seed=SEED,
        dtype="float32",
        plot=False,
        **more,
    )
    return evaluate(wanted, Console(quiet=True))


def make_ruler(models: Models, _console: Console, out: Path, size: int) -> dict[str, Any]:
    """Answers of the twin by length; the longest prompts are asked for needles alone."""
    found = {
        f"twin {length}": ask(
            models["twin"],
            QUANTIZERS,
            ("raw", "exact"),
            length,
            size,
            out / f"twin-{length}",
            tasks=tasks,
            stride=STRIDE,
        )
        for length, tasks in ASKED.items()
    }
    return {"stride": STRIDE, "runs": found}


def make_gates(models: Models, _console: Console, out: Path, size: int) -> dict[str, Any]:
    """The twin's needles behind the `combined` gate."""
    return ask(models["twin"], QUANTIZERS, ("raw", "gated", "exact"), NUM_TOKENS, 3 * size, out / "twin", tasks=NEEDLES)


def make_coverage(models: Models, console: Console, out: Path, size: int) -> dict[str, Any]:
    """Bounds on the same radii, of the original and of the twin."""
    found: dict[str, Any] = {}
    for name, path in models.items():
        specs = [parse_quantizer(quantizer) for quantizer in COVERED]
        result = analyses.analyse_coverage(inputs_of(path, 2 * size), specs, (DELTA,), console)
        if name == "twin":
            analyses.write_coverage(result, out, console, plot=True)
        found[name] = drawn_or_shown(result)
    return found


def drawn_or_shown(result: dict[str, Any]) -> dict[str, Any]:
    """Of coverage, the forms and tiers that a page shows."""
    for measured in result["quantizers"].values():
        measured["by_tau"] = {
            tier: {form: forms[form] for form in SHOWN}
            for tier, forms in measured["by_tau"].items()
            if tier in ("deterministic", f"{DELTA:g}")
        }
        measured["by_layer_head"] = {"deterministic": {f: measured["by_layer_head"]["deterministic"][f] for f in SHOWN}}
    return result


def make_trust(models: Models, console: Console, out: Path, size: int) -> dict[str, Any]:
    """Bound against truth, and the ranking, on the twin."""
    specs = [parse_quantizer(name) for name in TRUSTED]
    result = analyses.analyse_trust(inputs_of(models["twin"], 6 * size), specs, console)
    analyses.write_trust(result, out, console, plot=True)
    for measured in result["quantizers"].values():
        del measured["points"]
    return result


def make_layers(models: Models, console: Console, out: Path, size: int) -> dict[str, Any]:
    """One layer at a time, all, and runs from either end, on the twin."""
    result = analyses.analyse_layers(
        inputs_of(models["twin"], 3 * size), [parse_quantizer(name) for name in QUANTIZERS], console
    )
    analyses.write_layers(result, out, console, plot=True)
    return result


def make_drift(models: Models, _console: Console, _out: Path, size: int) -> dict[str, Any]:
    """Drift on Python's documentation, of the original and of the twin."""
    found: dict[str, Any] = {}
    for name, path in models.items():
        loaded = load_model(path, "float32")
        texts = windows(loaded.tokenizer, natural_text(), NATURAL, count=12 * size, context=256, tokens=64)
        specs = [parse_quantizer(quantizer) for quantizer in EVERY]
        found[name] = drift(loaded, specs, texts, {"resamples": RESAMPLES, "seed": SEED}, stride=STRIDE)
        for result in found[name]["quantizers"].values():
            del result["samples"]
    return found


def make_risk(models: Models, _console: Console, out: Path, size: int) -> dict[str, Any]:
    """Prose and needles of the models of `RANKED_SAMPLES` together, so that one curve is fitted for all; `out` keeps
    what was measured of every request."""
    specs = [parse_quantizer(name) for name in RANKED]
    rows: list[dict[str, Any]] = []
    counts = {}
    for name, samples in RANKED_SAMPLES.items():
        num_prose, num_needles = (size * count for count in samples)
        inputs = inputs_of(models[name], num_needles)
        prose = windows(
            inputs.loaded.tokenizer, natural_text(), NATURAL, count=num_prose, context=256, tokens=32
        ).samples
        requests = risk.requests_of(inputs.loaded, specs[0], prose, inputs.samples)
        counts[name] = {"prose": sum(not r.needle for r in requests), "needles": sum(r.needle for r in requests)}
        rows += [{"model": name, **row} for row in risk.measure(inputs.loaded, specs, requests)]
        write_json(out / "rows.json", rows)
    found = risk.analyse(rows, {"resamples": RESAMPLES, "seed": SEED})
    return {**found, "requests": counts, "stride": risk.STRIDE}


MAKERS: dict[str, Callable[[Models, Console, Path, int], dict[str, Any]]] = {
    "risk": make_risk,
    "ruler": make_ruler,
    "layers": make_layers,
    "trust": make_trust,
    "coverage": make_coverage,
    "drift": make_drift,
    "gates": make_gates,
}
