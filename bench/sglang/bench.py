"""`make bench-sglang`: capacity, speed, accuracy and repairs, from real servers on this machine's CPU.

Writes bench/sglang/results.json and results.md. `--only SECTION` measures one section and keeps the others.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from bench.common import accuracy, report
from bench.common.models import Models
from bench.common.sections import Sections, main
from bench.sglang import answers, capacity, gates_offline, speed

HEAD = "# SGLang on a CPU, measured\n\nWritten by `make bench-sglang`; the figures are in `results.json`."
SHOWN = {
    "capacity": (
        "Tokens at equal memory, by SGLang's own account (head_dim 128; free memory differs between starts, so per GB)",
        {**report.CAPACITY, "GB": lambda r: f"{r['gb']:.2f}"},
    ),
    **report.SECTIONS,
    "gates": (
        "What gates restore on the twin, % of all keys and values of a request (offline, target TV 0.2, blocks of 16)",
        {
            "quantizer": lambda r: r["quantizer"],
            "gate": lambda r: r["gate"],
            "right, %": lambda r: report.interval(r["right"]),
            "minus exact": lambda r: report.interval(r["minus_exact"]),
            "paged in, %": lambda r: report.interval(r["share"]),
        },
    ),
}


def sections(work: Path, per_task: int, num_tokens: int) -> Sections:
    models = Models(work)
    asked = accuracy.samples(per_task, num_tokens)

    def ask_all(model: Path, dtype: str = "float32") -> accuracy.AskAll:
        return functools.partial(answers.ask_all, model, work, dtype)

    return {
        "capacity": lambda: capacity.measure(models.wide, work),
        "speed": lambda: speed.measure(models.wide, work, rounds=9),
        "gates": lambda: gates_offline.measure(models.twin, accuracy.samples(max(1, per_task // 2), num_tokens)),
        "original": lambda: accuracy.on_the_original(ask_all(models.original), asked),
        "twin": lambda: accuracy.on_the_twin(ask_all(models.twin), ask_all(models.twin, "bfloat16"), asked),
    }


if __name__ == "__main__":
    sys.exit(main("bench.sglang.bench", __doc__, HEAD, SHOWN, sections))
