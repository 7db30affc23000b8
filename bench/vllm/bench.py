"""`make bench-vllm`: capacity, speed and what each INT8 cache does to answers, in vLLM on this machine's CPU.

Writes bench/vllm/results.json and results.md. `--only SECTION` measures one section and keeps the others. Rows of
capacity and speed are those of `make bench-sglang`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from witcert_demo.run import CHECKPOINT
from witcert_demo.tasks import Sample, make_samples

from witcert_core.layout import KVLayout

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "sglang"))
from models import wide_model  # noqa: E402

Row = dict[str, Any]
TASKS = ("single_needle", "multi_key", "variable_tracking")
SPEED_POLICIES: dict[str, Row | None] = {
    "off": None,
    "int8_token_group, stride 32": {"quantizer": {"name": "int8_token_group"}},
    "int8_token_group, stride 1": {"quantizer": {"name": "int8_token_group"}, "meter": {"stride": 1}},
    "int8_dither packed, stride 32": {"quantizer": {"name": "int8_dither", "storage": "packed"}},
}


class Bench:
    """Runs cases; `work` holds models, policies and results."""

    def __init__(self, work: Path, per_task: int, num_tokens: int) -> None:
        self.work = work
        self.samples: list[Sample] = [s for task in TASKS for s in make_samples(task, num_tokens, per_task, seed=61)]
        self.cases = 0

    def wide(self) -> Path:
        path = self.work / "wide"
        return path if path.exists() else wide_model(path)

    def run(self, model: Path, policy: Row | None, *, triton: bool = False, rounds: int = 0, **options: Any) -> Row:
        """What `child.py` finds; the questions are asked where no speed is measured and the model can answer them."""
        self.cases += 1
        written = ""
        records = self.work / f"{self.cases}.jsonl"
        if policy is not None:
            report = {"jsonl": str(records), "cells": "all"} if model == CHECKPOINT else {}
            path = self.work / f"{self.cases}.yaml"
            path.write_text(yaml.safe_dump({"version": 1, "report": report, **policy}))
            written = str(path)
        asked = [s.prompt for s in self.samples] if model == CHECKPOINT else []
        case, out = self.work / f"{self.cases}.json", self.work / f"{self.cases}.out"
        content = {"model": str(model), "policy": written, "triton": triton, "rounds": rounds}
        case.write_text(json.dumps({**content, "options": options, "prompts": asked}))
        env = {k: v for k, v in os.environ.items() if k != "WITCERT_POLICY"}
        subprocess.run([sys.executable, str(HERE / "child.py"), str(case), str(out)], env=env, check=True)
        found: Row = json.loads(out.read_text())
        if records.exists():
            lines = [json.loads(line) for line in records.read_text().splitlines()]
            found["cells"] = [line for line in lines if line.get("status") == "measured"]
        return found


def capacity(bench: Bench) -> list[Row]:
    """Tokens vLLM says it holds in 256 MiB, heads of 128 channels."""
    options = {"dtype": "bfloat16", "kv_cache_memory_bytes": 256 << 20}
    plain = bench.run(bench.wide(), None, **options)["tokens"]
    rows = [{"cache": "bf16", "tokens": plain, "ratio": 1.0, "by_layout": 1.0}]
    for name in ("int8_dither", "int8_dither_w", "int8_dither_bypass"):
        layout = KVLayout(128, stored_witness=name.endswith("_w"), bypass_pairs=4 if name.endswith("bypass") else 0)
        tokens = bench.run(bench.wide(), {"quantizer": {"name": name, "storage": "packed"}}, **options)["tokens"]
        ratio = {"ratio": tokens / plain, "by_layout": layout.capacity_ratio()}
        rows.append({"cache": f"{name}, packed", "tokens": tokens, **ratio})
    return rows


def speed(bench: Bench) -> list[Row]:
    """Median tokens a second, each policy alone in a process; 4 prompts of 256 at once, 64 new tokens."""
    options = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "enable_prefix_caching": False}
    found = {
        name: statistics.median(bench.run(bench.wide(), policy, rounds=3, **options)["speeds"])
        for name, policy in SPEED_POLICIES.items()
    }
    return [{"policy": name, "tokens_per_second": x, "ratio": x / found["off"]} for name, x in found.items()]


def caches(bench: Bench) -> list[Row]:
    """vLLM's own quantized caches and ours, same questions, every chunk reading what is stored."""
    metered = {"prefill_reads": "stored", "meter": {"stride": 1, "audit_every": 1}}
    rows = []
    for name, size, quantizer, triton, dtype in (
        ("vLLM fp8 (CPU)", 256, {"name": "engine"}, False, "fp8"),
        ("vLLM int8_per_token_head", 264, {"name": "engine"}, True, "int8_per_token_head"),
        ("int8_dither, packed", 272, {"name": "int8_dither", "storage": "packed"}, False, "auto"),
        ("int8_dither_w, packed", 276, {"name": "int8_dither_w", "storage": "packed"}, False, "auto"),
    ):
        options = {"dtype": "float32", "kv_cache_memory_bytes": 32 << 20, "kv_cache_dtype": dtype}
        found = bench.run(CHECKPOINT, {"quantizer": quantizer, **metered}, triton=triton, **options)
        pairs = zip(found["answers"], bench.samples, strict=True)
        summaries = [answer["summary"] for answer in found["answers"]]
        rows.append(
            {
                "cache": name,
                "bytes": size,
                "right": sum(answer["ids"] == list(sample.answer_ids) for answer, sample in pairs),
                "asked": len(bench.samples),
                "bound_mean": statistics.fmean(cell["meter"] for cell in found["cells"]),
                "bound_max": max(cell["meter"] for cell in found["cells"]),
                "tv_mean": statistics.fmean(cell["tv_audit"] for cell in found["cells"]),
                "tv_max": max(cell["tv_audit"] for cell in found["cells"]),
                "certified": sum(s["certified_cells"] for s in summaries) / sum(s["cells_measured"] for s in summaries),
                "violations": sum(s["audit"]["violations"] for s in summaries),
                "cells": len(found["cells"]),
            }
        )
    return rows


SECTIONS: dict[str, tuple[Callable[[Bench], list[Row]], str, dict[str, Callable[[Row], str]]]] = {
    "capacity": (
        capacity,
        "Tokens in 256 MiB, by vLLM's own account (head_dim 128, row ids included)",
        {
            "cache": lambda r: r["cache"],
            "tokens": lambda r: f"{r['tokens']}",
            "against bf16": lambda r: f"{r['ratio']:.3f}x",
            "by the layout": lambda r: f"{r['by_layout']:.3f}x",
        },
    ),
    "speed": (
        speed,
        "Generated tokens a second (4 prompts of 256 at once, 64 new tokens, random weights, float32, eager)",
        {
            "policy": lambda r: r["policy"],
            "tokens/s": lambda r: f"{r['tokens_per_second']:.1f}",
            "of the unmetered engine": lambda r: f"{r['ratio']:.2f}",
        },
    ),
    "caches": (
        caches,
        "vLLM's own caches and ours on the original model (head_dim 64; bytes a token and head at 128)",
        {
            "cache": lambda r: r["cache"],
            "bytes": lambda r: f"{r['bytes']}",
            "right": lambda r: f"{r['right']} of {r['asked']}",
            "bound, mean": lambda r: f"{r['bound_mean']:.4f}",
            "bound, worst": lambda r: f"{r['bound_max']:.3f}",
            "true TV, mean": lambda r: f"{r['tv_mean']:.5f}",
            "true TV, worst": lambda r: f"{r['tv_max']:.4f}",
            "bound at most 0.2": lambda r: f"{100 * r['certified']:.1f} %",
            "violations": lambda r: f"{r['violations']} of {r['cells']}",
        },
    ),
}


def markdown(results: Row) -> str:
    parts = ["# vLLM on a CPU, measured", "", "Written by `make bench-vllm`; the figures are in `results.json`."]
    for name, (_, title, columns) in SECTIONS.items():
        if name in results:
            found = results[name]
            rows = ["| " + " | ".join(show(row) for show in columns.values()) + " |" for row in found["rows"]]
            parts += ["", f"## {title}", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|", *rows, ""]
            parts.append(f"{found['date']}, {found['minutes']} minutes, {found['machine']}.")
    return "\n".join(parts) + "\n"


def main(only: list[str], per_task: int, num_tokens: int, out: Path) -> int:
    stored = out.with_suffix(".json")
    results: Row = json.loads(stored.read_text()) if only and stored.exists() else {}
    with tempfile.TemporaryDirectory(prefix="witcert-bench-") as scratch:
        bench = Bench(Path(scratch), per_task, num_tokens)
        for name, (measure, _, _) in SECTIONS.items():
            if only and name not in only:
                continue
            begun = time.monotonic()
            rows = measure(bench)
            results[name] = {
                "rows": rows,
                "date": datetime.date.today().isoformat(),
                "minutes": round((time.monotonic() - begun) / 60, 1),
                "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.0f}",
            }
            stored.write_text(json.dumps(results, indent=1) + "\n")
            out.with_suffix(".md").write_text(markdown(results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], choices=list(SECTIONS))
    parser.add_argument("--per-task", type=int, default=6)
    parser.add_argument("--num-tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    sys.exit(main(args.only, args.per_task, args.num_tokens, args.out))
