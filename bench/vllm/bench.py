"""`make bench-vllm`: the rows of `make bench-sglang` from vLLM on this machine's CPU, and its own caches beside ours.

Writes bench/vllm/results.json and results.md. `--only SECTION` measures one section and keeps the others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from witcert_demo.tally import Asked
from witcert_demo.tasks import Sample

from bench.common import accuracy, report
from bench.common.models import Models
from bench.common.sections import Sections, main
from bench.vllm import caches, capacity, speed
from bench.vllm.engines import running_engine

HEAD = "# vLLM on a CPU, measured\n\nWritten by `make bench-vllm`; the figures are in `results.json`."
SHOWN = {
    "capacity": (
        "Tokens in 256 MiB, by vLLM's own account (head_dim 128, pass ids included)",
        report.CAPACITY,
    ),
    **report.SECTIONS,
    "caches": (
        "vLLM's own caches and ours on the original model (head_dim 64; bytes a token and head at 128)",
        {
            "cache": lambda r: r["cache"],
            "bytes": lambda r: f"{r['bytes']}",
            "right": lambda r: f"{r['right']} of {r['asked']}",
            "bound, mean": lambda r: f"{r['bound_mean']:.4f}",
            "bound, worst": lambda r: f"{r['bound_max']:.3f}",
            "true TV, mean": lambda r: f"{r['tv_mean']:.5f}",
            "true TV, worst": lambda r: f"{r['tv_max']:.4f}",
            "bound at most 0.2": lambda r: report.share(r["certified"]),
            "violations": lambda r: f"{r['violations']} of {r['cells']}",
        },
    ),
}
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "enable_prefix_caching": False}


def sections(work: Path, per_task: int, num_tokens: int) -> Sections:
    models = Models(work)
    asked = accuracy.samples(per_task, num_tokens)

    def ask_all(model: Path, dtype: str = "float32") -> accuracy.AskAll:
        def ask(name: str, policy: dict[str, Any], asked: Sequence[Sample]) -> list[Asked]:
            with running_engine(model, work, name, policy, **{**OPTIONS, "dtype": dtype}) as engine:
                return engine.ask(asked)

        return ask

    return {
        "capacity": lambda: capacity.measure(models.wide, work),
        "speed": lambda: speed.measure(models.wide, work, rounds=9),
        "original": lambda: accuracy.on_the_original(ask_all(models.original), asked),
        "twin": lambda: accuracy.on_the_twin(ask_all(models.twin), ask_all(models.twin, "bfloat16"), asked),
        "caches": lambda: caches.measure(models.original, work, accuracy.samples(max(1, per_task // 2), num_tokens)),
    }


if __name__ == "__main__":
    sys.exit(main("bench.vllm.bench", __doc__, HEAD, SHOWN, sections))
