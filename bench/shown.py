"""The measured tables and sentences of README and docs, rendered from results and nothing else.

The results are ``docs/figures/*.json`` and what the engines' benchmarks leave in ``bench/*/results.json``. A page holds
a block between ``<!-- figures: NAME -->`` and ``<!-- end of NAME -->``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from witcert_demo.run import CHECKPOINT

from bench.blocks import (
    Result,
    coverage_block,
    drift_block,
    gates_block,
    layers_block,
    risk_block,
    ruler_block,
    trust_block,
)
from witcert_core.evaluate.capacity import read_shape
from witcert_core.evaluate.tables import markdown_table
from witcert_core.policy.model import GateSettings
from witcert_core.report.text import percent_down

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
BYTES_16_BIT = 512  # K and V of a token and KV head at head_dim 128
REAL: Mapping[str, Callable[[Result], str]] = {
    "ruler": ruler_block,
    "gates": gates_block,
    "drift": drift_block,
    "risk": risk_block,
    "coverage": coverage_block,
    "trust": trust_block,
    "layers": layers_block,
}
"""Of the real model, which takes hours: a section is shown once it was measured."""
SECTIONS: Mapping[str, Callable[[Result], str]] = {
    **REAL,
    "tiny_ruler": gates_block,
    "tiny_coverage": coverage_block,
    "tiny_trust": trust_block,
    "tiny_layers": layers_block,
}
"""Blocks that show one result, of the same name."""
RESULTS = (*SECTIONS, "capacity", "smoke")
ENGINES = {"sglang": "SGLang", "vllm": "vLLM"}
_BLOCK = re.compile(r"<!-- figures: (\w+) -->\n(.*?)<!-- end of \1 -->", re.S)

Results = Mapping[str, Mapping[str, Any]]


def read_results() -> dict[str, dict[str, Any]]:
    """All results but those of `REAL` that were never made; FileNotFoundError names another that was not."""
    files = {name: FIGURES / f"{name}.json" for name in RESULTS}
    files |= {name: ROOT / "bench" / name / "results.json" for name in ENGINES}
    return {name: json.loads(path.read_text()) for name, path in files.items() if name not in REAL or path.exists()}


def render(results: Results) -> dict[str, str]:
    """Every block by name."""
    return {
        "capacity": capacity_block(results["capacity"]),
        "engines": engines_block(results),
        "readme": readme_block(results),
        **{name: block(results[name]) for name, block in SECTIONS.items() if name in results},
    }


def blocks_of(text: str) -> dict[str, str]:
    """The blocks of a page, by name, as they stand there."""
    return {name: body.strip("\n") for name, body in _BLOCK.findall(text)}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def put_into_pages(blocks: Mapping[str, str]) -> None:
    """Renew every block of every page; KeyError for one that nothing renders, ValueError for one that no page shows."""
    shown = {name for page in pages() for name in blocks_of(page.read_text(encoding="utf-8"))}
    if missing := sorted(blocks.keys() - shown):
        raise ValueError(
            f"no page shows {', '.join(missing)}: put <!-- figures: NAME --> and its end into docs/evaluation.md"
        )
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = _BLOCK.sub(lambda m: f"<!-- figures: {m[1]} -->\n{blocks[m[1]]}\n<!-- end of {m[1]} -->", text)
        if new != text:
            page.write_text(new, encoding="utf-8")


def capacity_block(found: Mapping[str, Any]) -> str:
    columns = ("layout", "bytes a token", f"tokens in {found['memory'] / 1e9:g} GB", "against 16 bit")
    rows = []
    for row in found["rows"]:
        sizes = [f"{row['bytes_per_token']:,}", f"{row['tokens']:,}", f"{row['ratio']:.3f}x"]
        rows.append([f"`{row['layout']}`", *sizes])
    return markdown_table(columns, rows)


def engines_block(results: Results) -> str:
    """What SGLang and vLLM said of their own capacity, and speed against the same engine without the meter."""
    rows = []
    for section, key, digits, said in (
        ("capacity", "cache", 3, "tokens at equal memory"),
        ("speed", "policy", 2, "generated tokens a second"),
    ):
        found = [{row[key]: f"{row['ratio']:.{digits}f}x" for row in results[e][section]["rows"]} for e in ENGINES]
        first, second = (list(ratios)[1:] for ratios in found)  # the first row is what the others are held against
        if first != second:
            raise ValueError(f"bench: {section} has the rows {first} for SGLang and {second} for vLLM; measure both")
        rows += [[f"{said}: {name}", *(ratios[name] for ratios in found)] for name in first]
    return markdown_table(("against the same engine without the meter", *ENGINES.values()), rows)


def readme_block(results: Results) -> str:
    found = results["tiny_ruler"]
    ruler = {(row["quantizer"], row["mode"]): row for row in found["rows"]}
    rows = []
    for name, size in found["bytes"].items():
        raw, gated = ruler[name, "raw"], ruler[name, "gated"]
        rows.append(
            [
                name,
                f"{size / BYTES_16_BIT:.0%}",
                f"{raw['score']['value']:.2f}",
                percent_down(raw["meter"]["tv_certified_any_query_share"]),
                f"{gated['score']['value']:.2f}",
                f"{gated['repairs']['blocks_median']:g}",
                f"{raw['meter']['violations'] + gated['meter']['violations']}",
            ]
        )
    exact = ruler["none", "exact"]["score"]
    columns = ["KV cache", "bytes of 16 bit", "score", "certified", "score, gated", "repaired blocks", "violations"]
    shape, num_tokens = read_shape(CHECKPOINT), found["rows"][0]["cells"][0]["num_tokens"]
    blocks = sum(layer.num_kv_heads for layer in shape.layers) * -(-num_tokens // GateSettings().block_size)
    at = {name: results["tiny_coverage"][name]["quantizers"]["int8_dither"]["at_tau"] for name in ("original", "twin")}
    return (
        f"{markdown_table(columns, rows)}\n\nThe outlier twin, {exact['count']} questions, exact cache "
        f"{exact['value']:.2f}; certified: share of cells at the default τ, for any query; repaired blocks: median of "
        f"a request, of {blocks} in its prompt. On the same radii of `int8_dither` the published form certifies "
        f"{percent_down(at['original']['0.01']['eform'])} of the cells, the meter "
        f"{percent_down(at['original']['0.01']['meter'])} (original model, δ = 0.01; twin: "
        f"{percent_down(at['twin']['0.01']['eform'])} and {percent_down(at['twin']['0.01']['meter'])})."
    )
