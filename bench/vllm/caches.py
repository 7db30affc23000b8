"""vLLM's own quantized caches and ours: the same questions, every chunk reading what is stored."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from witcert_demo.tasks import Sample

from bench.common.accuracy import total
from bench.vllm.engines import running_engine

METERED = {"prefill_reads": "stored", "meter": {"stride": 1, "audit_every": 1}}
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 32 << 20}
CACHES = (
    ("vLLM fp8 (CPU)", 256, {"name": "engine"}, False, "fp8"),
    ("vLLM int8_per_token_head", 264, {"name": "engine"}, True, "int8_per_token_head"),
    ("int8_dither, packed", 272, {"name": "int8_dither", "storage": "packed"}, False, "auto"),
    ("int8_dither_w, packed", 276, {"name": "int8_dither_w", "storage": "packed"}, False, "auto"),
)
"""Name, bytes of a token and head at head_dim 128, quantizer, whether Triton attends, `--kv-cache-dtype`."""


def measure(model: Path, work: Path, asked: Sequence[Sample]) -> list[dict[str, Any]]:
    """One row a cache."""
    rows = []
    for number, (name, size, quantizer, triton, dtype) in enumerate(CACHES):
        records = work / f"cache-{number}.jsonl"
        policy = {"quantizer": quantizer, **METERED, "report": {"jsonl": str(records), "cells": "all"}}
        options = {**OPTIONS, "kv_cache_dtype": dtype}
        with running_engine(model, work, f"cache-{number}", policy, triton=triton, **options) as engine:
            answers = engine.ask(asked)
        lines = [json.loads(line) for line in records.read_text().splitlines()]
        cells = [line for line in lines if line.get("status") == "measured"]
        rows.append(
            {
                "cache": name,
                "bytes": size,
                "right": sum(answer.right for answer in answers),
                "asked": len(asked),
                "bound_mean": statistics.fmean(cell["meter"] for cell in cells),
                "bound_max": max(cell["meter"] for cell in cells),
                "tv_mean": statistics.fmean(cell["tv_audit"] for cell in cells),
                "tv_max": max(cell["tv_audit"] for cell in cells),
                "certified": total(answers, "tv_certified_cells") / total(answers, "cells_measured"),
                "violations": total(answers, "audit", "violations"),
                "cells": len(cells),
            }
        )
    return rows
