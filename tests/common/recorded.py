"""Recorded runs: what engines answered and reported once, against which every later version is held.

A recording is `tests/data/recorded/SUITE.json`. Of a run it keeps tokens, summaries and, of the JSON lines of every
cell, sums per request and layer and the bounds of two rows. `WITCERT_RECORD=1` writes it anew; do that only where a
change of values is meant, and say in the commit why they changed.

Tokens, counts and words must be equal, numbers within `HERE`: sums in another order differ by less, a wrong bound by
more. Another processor, or another build of PyTorch, multiplies matrices in another order. Where that moves a key over
a rounding boundary it gets another code (AVX2 in place of AVX-512: single bounds by 15 %), so numbers are compared
within `ELSEWHERE` there.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[1] / "data" / "recorded"
HERE, ELSEWHERE = (1e-4, 1e-6), (0.3, 1e-3)
"""Relative and absolute."""
ROUNDED = 1e-5
"""Of summed true values: when they were recorded, audits counted float32 rounding of weights next to 1 as variation.
What a bound is of such a value is not compared."""
NONCE = 5
"""In place of the random one, so that two runs draw the same dither."""
PINNED = Path(__file__).with_name("pinned")
"""A folder for `PYTHONPATH` by which an engine's own processes draw it too."""

RENAMED = {
    "witness": "deterministic",
    "dither": "probabilistic",
    "tier_w_beside": "deterministic_beside",
    "measured under tier D, which does not hold for this request": (
        "measured under the probabilistic tier, which does not hold for this request"
    ),
}
"""Names and words of JSON as they were recorded -> as they are today."""

LEFT_OUT = {"request_id", "claim", "risk"}
"""The risk follows from the sums of `log_a` that are recorded, and from a curve that may be fitted anew."""
SUMMED = ("meter", "floor", "log_a", "m", "tv_audit", "out_bound", "s", "s_quantized", "repaired_blocks")
COUNTED = ("tier", "form", "status", "reason")
SHOWN = ("meter", "out_bound")


def processor() -> dict[str, str]:
    """What decides in which order floats are added."""
    said = Path("/proc/cpuinfo")
    names = [line for line in said.read_text().splitlines() if line.startswith("model name")] if said.exists() else []
    model = names[0].partition(":")[2].strip() if names else "unknown"
    return {"torch": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability(), "model": model}


def run_of(answer: Sequence[int] | str, summary: dict[str, Any], records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One request as it is recorded. answer: tokens or text. records: JSON lines, of this request and of others."""
    mine = [r for r in records if r["request_id"] == summary["request_id"] and "layer" in r]
    kept = {key: value for key, value in summary.items() if key not in LEFT_OUT}
    return {"answer": answer, "summary": kept, **cells_of(mine)}


def cells_of(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums of every layer's cells, and the bounds of the first and the last row that was measured."""
    layers = sorted({cell["layer"] for cell in cells if cell["layer"] is not None})
    steps = sorted({cell["step"] for cell in cells if cell["step"] is not None})
    of_layer = {str(layer): [cell for cell in cells if cell["layer"] == layer] for layer in layers}
    unknown = [cell for cell in cells if cell["layer"] is None]
    shown = {}
    for step in steps[:: max(len(steps) - 1, 1)]:
        row = [cell for cell in cells if cell["step"] == step]
        shown[str(step)] = {key: [cell[key] for cell in row] for key in SHOWN}
    return {
        "unknown": {"rows": sum(cell["rows"] for cell in unknown), **counts(unknown)},
        "layers": {layer: {**sums(found), **counts(found)} for layer, found in of_layer.items()},
        "rows": shown,
    }


def sums(cells: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of all that is finite; how many are not."""
    found: dict[str, float] = {}
    for key in SUMMED:
        finite = [cell[key] for cell in cells if cell[key] not in (None, "inf")]
        found[key] = sum(finite)
    return {**found, "infinite": sum(cell[key] == "inf" for cell in cells for key in SUMMED)}


def counts(cells: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    return {key: dict(Counter(str(cell[key]) for cell in cells if cell.get(key) is not None)) for key in COUNTED}


def rounded(value: Any) -> Any:
    """Floats to eight digits: shorter, and far below any tolerance."""
    if isinstance(value, float):
        return float(f"{value:.7e}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def renamed(value: Any) -> Any:
    if isinstance(value, dict):
        return {RENAMED.get(key, key): renamed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [renamed(item) for item in value]
    return RENAMED.get(value, value) if isinstance(value, str) else value


def check(suite: str, case: str, found: Any) -> None:
    """Hold one case to its recording; AssertionError says what differs, with both values."""
    path = FOLDER / f"{suite}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    found = rounded(json.loads(json.dumps(found)))
    if os.environ.get("WITCERT_RECORD"):
        kept |= {"processor": processor(), case: found}
        path.write_text(lines(kept))
        return
    assert case in kept, f"{case} is not recorded in {path}: run this test with WITCERT_RECORD=1"
    within = HERE if kept["processor"] == processor() else ELSEWHERE
    apart = list(differences(renamed(kept[case]), found, case, within))
    said = "\n".join(f"{where}: recorded {old}, now {new}" for where, old, new in apart[:40])
    assert not apart, f"{len(apart)} values differ from {path.name}\n{said}"


def lines(kept: dict[str, Any]) -> str:
    """JSON with a line for each run, so that a difference of two recordings can be read."""
    parts = []
    for case, found in kept.items():
        if isinstance(found, list):
            runs = ",\n".join(json.dumps(run, separators=(",", ":")) for run in found)
            parts.append(f"{json.dumps(case)}: [\n{runs}\n]")
        else:
            parts.append(f"{json.dumps(case)}: {json.dumps(found)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def differences(old: Any, new: Any, where: str, within: tuple[float, float]) -> Iterator[tuple[str, Any, Any]]:
    """Where two trees of JSON differ, with both values. within: relative and absolute tolerance of floats."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key, "nothing"), new.get(key, "nothing"), f"{where}.{key}", within)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{where}[{number}]", within)
    elif {type(old), type(new)} in ({float}, {float, int}):
        absolute = max(within[1], ROUNDED) if where.endswith("tv_audit") else within[1]
        if ".bound_over_tv." not in where and not math.isclose(old, new, rel_tol=within[0], abs_tol=absolute):
            yield where, old, new
    elif old != new:
        yield where, old, new
