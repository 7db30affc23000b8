"""Tokens that SGLang itself says it holds, per byte it says they take, against a bfloat16 cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from witcert_demo.servers import running_server

from bench.common.models import KV_HEADS, LAYERS, PACKED

SIZES = re.compile(r"#tokens: (\d+), K size: ([\d.]+) GB, V size: ([\d.]+) GB")


def tokens_per_gb(
    model: Path, work: Path, name: str, policy: dict[str, Any] | None, dtype: str, side_bytes: int = 0
) -> dict[str, Any]:
    """side_bytes: of a token, which SGLang does not count among the bytes of its pool."""
    path = None
    if policy is not None:
        path = work / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"version": 1, **policy}))
    # A large pool: its size is said in steps of 10 MB.
    options = ["--dtype", "bfloat16", "--kv-cache-dtype", dtype, "--mem-fraction-static", "0.35"]
    options += ["--max-total-tokens", "100000000"]
    with running_server(model, policy=path, log=work / f"{name}.log", options=options) as server:
        with server.client() as client:
            tokens = client.get("/server_info").raise_for_status().json()["max_total_num_tokens"]
        found = SIZES.search(server.log_text())
    if found is None or int(found[1]) != tokens:
        raise RuntimeError(f"{work / name}.log says {found}, the server {tokens} tokens")
    gigabytes = float(found[2]) + float(found[3]) + tokens * side_bytes / 2**30
    return {"tokens": tokens, "gb": gigabytes, "tokens_per_gb": tokens / gigabytes}


def measure(model: Path, work: Path) -> list[dict[str, Any]]:
    """One row a cache; `ratio` against bfloat16, `by_layout` what the bytes say."""
    rows = [{"cache": "bf16", "by_layout": 1.0, **tokens_per_gb(model, work, "bf16", None, "bf16")}]
    for name, layout in PACKED.items():
        policy = {"quantizer": {"name": name, "storage": "packed"}}
        beside = sum(layout.fields().get(field, (0, 0))[1] for field in ("k_witness", "k_bypass"))
        found = tokens_per_gb(model, work, name, policy, "auto", beside * LAYERS * KV_HEADS)
        rows.append({"cache": f"{name}, packed", "by_layout": layout.capacity_ratio(), **found})
    return [{**row, "ratio": row["tokens_per_gb"] / rows[0]["tokens_per_gb"]} for row in rows]
