"""README and docs against the code: keys, defaults, paths, names and figures are looked up, not believed."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import annotated_types
import pytest
import torch
import yaml
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from witcert_core.cache.bands import band_map
from witcert_core.cache.capacity import BANDS
from witcert_core.cache.norm_codes import witness_codes
from witcert_core.errors import PolicyError
from witcert_core.evaluate.canary_metrics import CanaryMetrics
from witcert_core.meter.bounds.vectors import check_vectors, load_vectors
from witcert_core.meter.kernel_error import UNIT
from witcert_core.policy.gate_registry import GATES
from witcert_core.policy.loader import PolicyLoader
from witcert_core.policy.model import GateSettings, MeterSettings, Policy, load_policy, parse_policy
from witcert_core.policy.presets import PRESETS, preset_text
from witcert_core.probes.fields import FIELDS
from witcert_core.probes.language import parse_probe
from witcert_core.quantizers import REGISTRY
from witcert_core.quantizers.layout import KVLayout
from witcert_core.quantizers.rotary import RotarySpec
from witcert_core.report.prometheus import Metrics
from witcert_core.serving import control, http

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TEXT = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
UNFENCED = {name: re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M) for name, text in TEXT.items()}
BUILTIN = REGISTRY.from_package("witcert_core")


def in_code(name: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", UNFENCED[name])


def table_rows(name: str, first_cell: str) -> list[list[str]]:
    """Cells of the table rows of a page whose first cell matches the pattern."""
    lines = [line for line in UNFENCED[name].splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if re.fullmatch(first_cell, row[0])]


def leaves(model: type[BaseModel] = Policy, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, f"{name}.")
        else:
            yield prefix + name, field


KEYS = dict(leaves())
KEY_ROWS = [row for row in table_rows("policy.md", r"`[a-z_.]+`") if len(row) == 4]
POLICY_ROWS = {row[0].strip("`"): row for row in KEY_ROWS}


def test_the_policy_page_has_exactly_the_keys_of_the_model() -> None:
    assert len(KEYS) > 20
    assert sorted(row[0].strip("`") for row in KEY_ROWS) == sorted(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_a_policy_key_is_documented_with_its_default_and_its_limits(key: str) -> None:
    field, (_, allowed, default, meaning) = KEYS[key], POLICY_ROWS[key]
    if field.is_required():
        assert default == "required"
    else:
        written = yaml.load(default.strip("`"), Loader=PolicyLoader)
        expected = field.get_default(call_default_factory=True)
        assert (type(written), written) == (type(expected), expected)
    for value in get_args(field.annotation):
        if isinstance(value, str | int):
            assert f"`{value}`" in allowed
    symbols = {annotated_types.Gt: "> {0.gt}", annotated_types.Ge: "≥ {0.ge}", annotated_types.Lt: "< {0.lt}"}
    symbols |= {annotated_types.Le: "≤ {0.le}"}
    limits = [symbols[type(rule)].format(rule) for rule in field.metadata if type(rule) in symbols]
    assert re.findall(r"[><≥≤] \d+", allowed) == limits
    assert len(meaning) > 10


def test_built_in_names_are_documented_and_documented_names_are_built_in() -> None:
    assert set(re.findall(r"`([a-z0-9_]+)`", POLICY_ROWS["quantizer.name"][1])) == set(BUILTIN)
    assert set(re.findall(r"`([a-z_]+)`", POLICY_ROWS["gate.kind"][1])) == set(GATES.names())
    for name in TEXT:
        named = {code for code in in_code(name) if re.fullmatch(r"(int|fp)\d+_\w+", code)}
        assert named <= set(BUILTIN), name
    for name in BUILTIN:
        known = set(REGISTRY.parameters(name))
        allowed = {"int8_dither_bypass": {"pairs"}}
        assert known <= allowed.get(name, {"group_size"} if name.endswith("_token_group") else set()), name
    assert REGISTRY.get("int4_token_group") == REGISTRY.get("int4_token_group", {"group_size": 32})
    assert REGISTRY.get("int8_dither_bypass") == REGISTRY.get("int8_dither_bypass", {"pairs": 4})
    assert "`pairs` (outlier channel pairs of K in 16 bit, 4 unless given)" in POLICY_ROWS["quantizer.params"][3]
    assert "`group_size` (channels that share a scale, 32 unless given)" in POLICY_ROWS["quantizer.params"][3]
    presets = re.search(r"`--preset (\w+)`, `(\w+)` or\s`(\w+)`", TEXT["policy.md"])
    assert presets is not None
    assert presets.groups() == PRESETS


def test_the_complete_example_is_complete_and_valid() -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", TEXT["policy.md"], flags=re.S | re.M)
    data = yaml.load(example, Loader=PolicyLoader)
    assert parse_policy(data).tier == "probabilistic"
    written = {
        f"{section}.{key}" if isinstance(inner, dict) else section
        for section, inner in data.items()
        for key in (inner if isinstance(inner, dict) else [section])
    }
    assert written == set(KEYS)


@pytest.mark.parametrize("row", table_rows("policy.md", r"`\{.*\}`"), ids=lambda row: row[0])
def test_what_the_policy_page_calls_refused_is_refused_by_that_key(row: list[str], tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    valid = {"version": 1, "quantizer": {"name": "none"}}
    path.write_text(yaml.safe_dump(valid | yaml.load(row[0].strip("`"), Loader=PolicyLoader)))
    with pytest.raises(PolicyError) as raised:
        load_policy(path)
    assert str(raised.value).startswith(f"{path}: {row[1].strip('`')}: ")


def test_there_are_refusals_to_check() -> None:
    assert len(table_rows("policy.md", r"`\{.*\}`")) >= 10


@pytest.mark.parametrize("name", TEXT)
def test_every_path_and_link_leads_somewhere(name: str) -> None:
    page = next(page for page in PAGES if page.name == name)
    ignored = {line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()}
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", UNFENCED[name]) if "://" not in link]
    paths = [code for code in in_code(name) if re.fullmatch(r"[\w.-]+/[\w./-]*", code)]
    missing = [link for link in links if not (page.parent / link.partition("#")[0]).exists()]
    missing += [p for p in paths if p.rstrip("/") not in ignored and not (ROOT / p).exists()]
    assert missing == []


def test_there_are_paths_to_check() -> None:
    assert sum("/" in code for name in TEXT for code in in_code(name)) > 30


@pytest.mark.parametrize("name", TEXT)
def test_every_route_named_is_served(name: str) -> None:
    routes = [code for code in in_code(name) if "/witcert/" in code and "witcert_sglang" not in code]
    served = {
        http.STATUS_ROUTE,
        http.REQUEST_ROUTE,
        http.POLICY_ROUTE,
        http.SUMMARY_ROUTE,
        control.PROBES_ROUTE,
        control.PROBE_ROUTE,
    }
    named = {re.sub(r"^(GET|POST|DELETE) ", "", route) for route in routes}
    named = {route.replace("requests/{id}", "requests/{request_id:path}") for route in named}
    assert {route.replace("probes/{id}", "probes/{probe_id}") for route in named} <= served


def test_every_test_cited_exists() -> None:
    functions = {
        node.name
        for file in (ROOT / "tests").glob("*/test_*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    cited = [code for name in TEXT for code in in_code(name) if code.startswith("test_")]
    assert len(cited) >= 10
    assert set(cited) <= functions


def test_sizes_are_those_of_the_layout() -> None:
    layouts = (KVLayout(128), KVLayout(128, stored_witness=True), KVLayout(128, bypass_pairs=4), KVLayout(80))
    shown = [tuple(row[1:]) for row in table_rows("meter.md", r"`int8_dither(_w)?`|four channel pairs .*")]
    assert shown == [(str(x.head_dim), str(x.bytes_per_token_head), f"{x.capacity_ratio():.2f}x") for x in layouts]
    assert [x.bytes_per_token_head for x in layouts] == [272, 276, 288, 172]
    assert REGISTRY.get("int8_dither_bypass").bytes_per_token_head(128) == 288
    for quantizer, layout in zip(("int8_dither", "int8_dither_w"), layouts, strict=False):
        size = REGISTRY.get(quantizer).bytes_per_token_head(128)
        assert size == layout.bytes_per_token_head
        assert f"{size:g} bytes" in preset_text("int8")


def test_the_layout_is_documented_to_the_byte() -> None:
    layouts = (KVLayout(128), KVLayout(128, stored_witness=True), KVLayout(128, bypass_pairs=4))
    names = list(KVLayout(128, bypass_pairs=4, stored_witness=True).fields())
    rows = table_rows("meter.md", r"`[kv]_[a-z]+`")
    assert [row[0].strip("`") for row in rows] == names
    for column, layout in enumerate(layouts, start=2):
        sizes = {name: size for name, (_, size) in layout.fields().items()}
        assert [int(row[column]) for row in rows] == [sizes.get(name, 0) for name in names]


def test_tightness_is_that_of_the_vectors() -> None:
    cases = load_vectors(ROOT / "tests" / "data" / "bounds.json")
    assert f"{len(cases)} cells of `tests/data/bounds.json`" in TEXT["meter.md"]
    for form in check_vectors(cases):
        rows = [row for row in table_rows("meter.md", f"`{form.name}`") if len(row) == 3]
        assert rows == [[f"`{form.name}`", f"{form.quantile(0.5):.3f}", f"{form.quantile(0.95):.3f}"]]


def test_figures_of_the_readme_and_the_mathematics() -> None:
    readme, meter = TEXT["README.md"], TEXT["meter.md"]
    key = torch.randn(1, 1, 128)
    spec = RotarySpec(128)
    few, many = (str(bands) for bands in BANDS)
    assert (
        re.findall(r"each of (\d+) bands of channels \((\d+) where bytes allow", readme)
        == [(few, many)]
        == re.findall(r"rotary\s+pairs, \$B\$ of them: (\d+), or (\d+)", meter)
    )
    assert [witness_codes(key, key, band_map(spec, bands)).nbytes for bands in BANDS] == list(BANDS)  # "a byte each"

    delta, tau = MeterSettings().delta, GateSettings().tau
    assert re.findall(r"1 − δ \(default ([\d.]+)\)", readme) == [str(delta)]
    assert re.findall(r"\\delta\$, by default ([\d.]+\d)", meter) == [str(delta)]
    assert re.findall(r"τ = ([\d.]+\d)", readme) == [str(tau)] == re.findall(r"\\tau\$, by default ([\d.]+\d)", meter)

    assert re.findall(r"last (\d+) requests", readme) == [str(http.KEPT_SUMMARIES)]
    assert "2⁻⁸" in TEXT["limits.md"]
    assert UNIT[torch.bfloat16] == 2.0**-8


def test_what_clients_may_ask_for_is_bounded_as_written() -> None:
    bounds = {row[0]: row[1] for row in table_rows("http.md", r".*") if len(row) == 3}
    assert bounds["summaries kept"] == f"the last {http.KEPT_SUMMARIES}, and {http.KEPT_BYTES >> 20} MiB of JSON"
    assert bounds["an id"] == f"{http.LONGEST_ID} characters"
    assert bounds["an answer"] == f"{http.LARGEST_ANSWER >> 20} MiB"
    assert http.STATUS_SECONDS == 1.0


def test_the_tables_of_refusals_are_those_of_the_adapters() -> None:
    """`make docs-limits` writes them."""
    path = ROOT / "adapters" / "limits.py"
    assert subprocess.run([sys.executable, str(path), "--check"], timeout=120).returncode == 0


def test_the_table_of_models_is_that_of_the_rows() -> None:
    """`make docs-models` writes it."""
    path = ROOT / "adapters" / "models.py"
    assert subprocess.run([sys.executable, str(path), "--check"], timeout=120).returncode == 0


@pytest.mark.parametrize(("engine", "folder"), [("SGLang", "sglang"), ("vLLM", "vllm")])
def test_the_version_of_an_engine_is_the_one_that_is_accepted(engine: str, folder: str) -> None:
    adapter = (ROOT / "adapters" / folder / f"witcert_{folder}" / "adapter.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'tested="(.*)"', adapter)
    for name, text in TEXT.items():
        assert set(re.findall(rf"{engine} (?:but )?(\d+\.\d+\.\d+)", text)) <= {version}, name
    assert f"{engine} {version}" in TEXT["README.md"]
    nodeps = (ROOT / "adapters" / folder / "requirements-cpu-nodeps.txt").read_text(encoding="utf-8")
    assert re.search(rf"^{folder}(-cpu)?=={re.escape(version)}$", nodeps, flags=re.M)


def test_every_name_of_a_probe_is_documented_as_it_is() -> None:
    written = {row[0].strip("`"): row[1:] for row in table_rows("probes.md", r"`[a-z_]+`") if len(row) == 3 and row[1]}
    kinds = {name: written[name] for name in FIELDS}
    for name, field in FIELDS.items():
        words = f": {', '.join(f'`{word}`' for word in field.words)}" if field.words else ""
        assert kinds[name] == [f"{field.kind}{words}", field.says]


def test_every_probe_of_the_docs_can_be_asked() -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT["probes.md"], flags=re.S | re.M)
    probes = [text for language, text in blocks if not language]
    assert probes
    for probe in probes:
        parse_probe(probe)


def test_every_metric_is_documented_as_it_is() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    shown = {}
    for family in (*registry._collector_to_names, *CanaryMetrics().registry._collector_to_names):
        name = f"{family._name}_total" if family._type == "counter" else family._name  # type: ignore[attr-defined]
        labels = ", ".join(f"`{label}`" for label in family._labelnames)  # type: ignore[attr-defined]
        shown[f"`{name}`"] = [family._type, labels, family._documentation]  # type: ignore[attr-defined]
    assert {row[0]: row[1:] for row in table_rows("metrics.md", r"`witcert_\w+`")} == shown
