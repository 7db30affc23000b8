"""Tokens that vLLM itself says it holds in equal memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.common.models import PACKED
from bench.vllm.engines import running_engine

MEMORY = 256 << 20


def tokens(model: Path, work: Path, name: str, policy: dict[str, Any] | None) -> int:
    with running_engine(model, work, name, policy, dtype="bfloat16", kv_cache_memory_bytes=MEMORY) as engine:
        return int(engine.call("tokens"))


def measure(model: Path, work: Path) -> list[dict[str, Any]]:
    """One row a cache; `ratio` against bfloat16, `by_layout` what the bytes say."""
    plain = tokens(model, work, "bf16", None)
    rows = [{"cache": "bf16", "tokens": plain, "ratio": 1.0, "by_layout": 1.0}]
    for name, layout in PACKED.items():
        found = tokens(model, work, name, {"quantizer": {"name": name, "storage": "packed"}})
        by_layout = layout.capacity_ratio()
        rows.append({"cache": f"{name}, packed", "tokens": found, "ratio": found / plain, "by_layout": by_layout})
    return rows
