"""Policy files: what is accepted, what is refused, and that a refusal tells the user what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from witcert_core import Policy, PolicyError, load_policy
from witcert_core.policy.gates import Combined
from witcert_core.policy.loader import PolicyLoader
from witcert_core.policy.model import parse_policy
from witcert_core.policy.presets import PRESETS, preset_text


def policy(quantizer: str = "int4_token_group", **sections: Any) -> Policy:
    return parse_policy({"version": 1, "quantizer": {"name": quantizer}, **sections}, "p.yaml")


def test_defaults() -> None:
    p = policy()
    assert (p.prefill_reads, p.tier, p.repairs) == ("chunk_exact", "deterministic", False)
    assert (p.meter.form, p.meter.delta, p.meter.max_rows, p.stride) == ("auto", 0.01, 8, 32)
    assert (p.meter.audit_every, p.meter.declared_rows, p.meter.layers) == (0, None, None)
    assert (p.gate.kind, p.gate.target, p.gate.tau, p.gate.tau_out, p.gate.risk_tau) == (
        "observe",
        "both",
        0.2,
        0.1,
        5,
    )
    assert (p.gate.block_size, p.gate.max_pagein_bytes, p.gate.on_exhausted) == (16, None, "serve")
    assert (p.report.jsonl, p.report.cells, p.report.prometheus, p.report.per_request) == (
        None,
        "none",
        True,
        True,
    )


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"gate": {"tua": 0.1}},
            "p.yaml: gate.tua: unknown key (did you mean 'tau'?); allowed: kind, params, target, tau, tau_out, "
            "risk_tau, block_size, max_pagein_bytes, copy_bytes, on_exhausted",
        ),
        (
            {"metre": {}},
            "p.yaml: metre: unknown key (did you mean 'meter'?); allowed: version, quantizer, prefill_reads, "
            "meter, gate, report",
        ),
        ({"version": 2}, "p.yaml: version: is 2; allowed: 1"),
        ({"gate": {"tau": 1.5}}, "p.yaml: gate.tau: is 1.5; allowed: less than or equal to 1"),
        ({"gate": {"tau": "high"}}, "p.yaml: gate.tau: is 'high'; allowed: a valid number"),
        ({"gate": {"tau": True}}, "p.yaml: gate.tau: is true; allowed: a valid number"),
        ({"gate": {"tau": float("nan")}}, "p.yaml: gate.tau: is nan; allowed: a finite number"),
        (
            {"gate": {"target": "outputs"}},
            "p.yaml: gate.target: is 'outputs' (did you mean 'output'?); allowed: 'tv', 'output' or 'both'",
        ),
        (
            {"gate": {"kind": "combine"}},
            "p.yaml: gate.kind: unknown gate 'combine' (did you mean 'combined'?); known: "
            "observe, certified, risk_ranked, combined",
        ),
        (
            {"gate": None},
            "p.yaml: gate: is null; allowed: a mapping with the keys kind, params, target, tau, tau_out, risk_tau, "
            "block_size, max_pagein_bytes, copy_bytes, on_exhausted",
        ),
        ({"meter": {"delta": 0}}, "p.yaml: meter.delta: is 0; allowed: greater than 0"),
        ({"meter": {"stride": 0}}, "p.yaml: meter.stride: is 0; allowed: an integer of at least 1, never, or null"),
        ({"meter": {"stride": 2.5}}, "p.yaml: meter.stride: is 2.5; allowed: an integer of at least 1, never, or null"),
        (
            {"meter": {"tier": "probabilistic"}},
            "p.yaml: meter.tier: is 'probabilistic', but quantizer 'int4_token_group' has no dither "
            "law; allowed: 'auto', 'deterministic', or a dithered quantizer such as 'int8_dither'",
        ),
        (
            {"meter": {"layers": ["3-1"]}},
            "p.yaml: meter.layers: has the entry '3-1'; layers run upwards from 0 to at most 65535",
        ),
        (
            {"meter": {"layers": ["1-"]}},
            "p.yaml: meter.layers: has the entry '1-'; allowed: layer ids and ranges, e.g. [0, \"4-7\"]",
        ),
        ({"meter": {"layers": []}}, "p.yaml: meter.layers: names no layer; write null for every layer"),
        (
            {"meter": {"layers": [-1]}},
            "p.yaml: meter.layers: has the entry -1; layers run upwards from 0 to at most 65535",
        ),
        (
            {"report": {"cells": "all"}},
            "p.yaml: report.cells: is 'all', but cell records go to report.jsonl, which is "
            "null; give it a path or set report.cells to 'none'",
        ),
        ({"quantizer": {}}, "p.yaml: quantizer.name: is missing; it has no default"),
        (
            {"quantizer": {"name": "int4_token_grp"}},
            "p.yaml: quantizer.name: unknown quantizer 'int4_token_grp' (did you mean 'int4_token_group'?); known: ",
        ),
        (
            {"quantizer": {"name": "int4_token_group", "params": {"group": 3}}},
            "p.yaml: quantizer.params: quantizer "
            "'int4_token_group': unknown parameter 'group' (did you mean 'group_size'?); allowed: group_size",
        ),
        (
            {"meter": {"strid": 1}, "gate": {"tau": 2}},
            "p.yaml: meter.strid: unknown key (did you mean 'stride'?); "
            "allowed: tier, form, sketch_bits, bands, delta, max_rows, stride, layers, audit_every, audit_share, "
            "sketch_share, share_bytes, share_seed, declared_rows; "
            "gate.tau: is",
        ),
    ],
)
def test_refusals_name_key_value_and_what_is_allowed(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError) as raised:
        parse_policy({"version": 1, "quantizer": {"name": "int4_token_group"}, **sections}, "p.yaml")
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("", ": is empty, expected a mapping"),
        ("- 1", ": holds [1], expected a mapping"),
        ("version: true", ": version: is true, which is no integer"),
        ("version: 1.0", ": version: is 1.0, which is no integer"),
        ("version: '1'", ": version: is '1'; allowed: 1"),
        ("version: !!int ''", ": not valid YAML: found no int that can be read"),
        ("version: " + "9" * 5000, ": not valid YAML: found no int that can be read"),
        ("gate: {tau: !!float high}", ": not valid YAML: found no float that can be read"),
        ("report: {prometheus: !!bool maybe}", ": not valid YAML: found no bool that can be read"),
        ("[" * 5000, ": not valid YAML: nested too deeply"),
        ("meter: {sketch_bits: false}", ": meter.sketch_bits: is false, which is no integer"),
        ("meter: {sketch_bits: 4.0}", ": meter.sketch_bits: is 4.0, which is no integer"),
        ("meter: {stride: 010}", ": meter.stride: is '010'; allowed: an integer of at least 1, never, or null"),
        ("meter: {stride: 1:30}", ": meter.stride: is '1:30'; allowed: an integer of at least 1, never, or null"),
        ("meter: {stride: 9999999999999999999}", ": meter.stride: is 9999999999999999999; allowed: at most 2^63 - 1"),
        ("meter: {stride: 1e3}", ": meter.stride: is 1000.0; allowed: an integer of at least 1, never, or null"),
        ("meter: {layers: '٣-٤'}", ": meter.layers: has the entry '٣-٤'; allowed: layer ids"),
        ("meter: {layers: [null]}", ": meter.layers: has the entry null; allowed: layer ids"),
        ("meter: {on: 1}", ": meter: has the key true, which is no text; allowed: tier, form"),
        ("~: 1", ": has the key null, which is no text; allowed: version, quantizer"),
        ("gate: {block_size: 65537}", ": gate.block_size: is 65537; allowed: less than or equal to 65536"),
        ("report: {jsonl: ''}", ": report.jsonl: is ''; allowed: text that is not empty"),
        ('report: {jsonl: "a\\0"}', ": report.jsonl: is 'a\\x00'; allowed: text without a zero byte"),
        ("report: {jsonl: 2026-02-31}", ""),
        ("meter: {stride: 0x10}\ngate: {tau: .5e-1}", ""),
        ("gate: {tau: 1_0e-3}\nmeter: {stride: 1_0}", ""),
    ],
    ids=lambda text: text[:30],
)
def test_what_yaml_makes_of_odd_text(written: str, message: str, tmp_path: Path) -> None:
    """One line that names the key; no message: accepted, and read as people write it."""
    path = tmp_path / "p.yaml"
    given = written.partition(":")[0]
    rest = {"version": "version: 1", "quantizer": "quantizer: {name: none}"}
    broken = written[:1] in ("", "-", "[")
    path.write_text("\n".join([written, *(line for key, line in rest.items() if key != given and not broken)]))
    if not message:
        assert load_policy(path).gate.tau in (0.2, 0.05, 0.01)
        return
    with pytest.raises(PolicyError) as raised:
        load_policy(path)
    assert str(raised.value).startswith(f"{path}{message}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"group_size": True}, "parameter 'group_size' is true; allowed: a valid integer"),
        ({"group_size": 2**40}, "group_size is 1099511627776; expected 1 to 65536"),
        ({1: 2}, "quantizer.params: has the key 1, which is no text"),
    ],
)
def test_parameters_are_refused_in_the_words_of_the_file(params: dict[Any, Any], message: str) -> None:
    with pytest.raises(PolicyError) as raised:
        parse_policy({"version": 1, "quantizer": {"name": "int4_token_group", "params": params}})
    assert message in str(raised.value)


PACKED = {"name": "int8_dither", "storage": "packed"}


def test_a_gate_that_repairs_has_a_sketch_unless_told_otherwise() -> None:
    gate = {"kind": "certified"}
    assert policy(quantizer="int4_token_group").sketch_bits == 0
    assert policy(quantizer="int4_token_group", gate=gate).sketch_bits == 4
    assert policy(quantizer="int4_token_group", gate=gate, meter={"sketch_bits": 0}).sketch_bits == 0
    assert policy(quantizer="int8_dither", gate=gate).sketch_bits == 4
    assert parse_policy({"version": 1, "quantizer": PACKED, "gate": gate}, "p.yaml").sketch_bits == 0
    coded = {"name": "int4_token_group", "storage": "packed"}
    assert parse_policy({"version": 1, "quantizer": coded, "gate": gate, "meter": {"bands": 32}}).sketch_bits == 4
    assert policy(quantizer="int8_dither", gate=gate, meter={"tier": "probabilistic"}).sketch_bits == 0


@pytest.mark.parametrize("quantizer", ["none", "engine"])
def test_what_cannot_be_stored_says_why_and_what_can(quantizer: str) -> None:
    wanted = {"version": 1, "quantizer": {"name": quantizer, "storage": "packed"}}
    said = f"quantizer.storage: is 'packed', but quantizer '{quantizer}' has no encode and decode"
    with pytest.raises(PolicyError, match=said) as raised:
        parse_policy(wanted, "p.yaml")
    assert "allowed: 'simulated', or what `witcert quantizers` calls packed" in str(raised.value)


def test_sketches_and_the_law_of_a_dither_exclude_each_other() -> None:
    assert policy(quantizer="int8_dither", meter={"sketch_bits": 2}).tier == "deterministic"
    assert policy(quantizer="int8_dither").tier == "probabilistic"
    with pytest.raises(PolicyError, match=r"meter\.sketch_bits: is 2, but meter\.tier is 'probabilistic'"):
        policy(quantizer="int8_dither", meter={"sketch_bits": 2, "tier": "probabilistic"})
    with pytest.raises(PolicyError, match=r"meter\.sketch_bits: is 2, but the packed cache of 'int8_dither' keeps"):
        parse_policy({"version": 1, "quantizer": PACKED, "meter": {"sketch_bits": 2}}, "p.yaml")


@pytest.mark.parametrize("kind", ["certified", "risk_ranked", "combined"])
def test_a_gate_that_repairs_meters_every_row(kind: str) -> None:
    assert policy(gate={"kind": kind}).stride == 1
    assert policy(gate={"kind": kind}, meter={"stride": 1}).repairs
    with pytest.raises(PolicyError, match=f"meter.stride: is 32, but gate '{kind}' repairs and needs every cell"):
        policy(gate={"kind": kind}, meter={"stride": 32})


def test_observing_keeps_its_stride() -> None:
    assert policy(gate={"kind": "observe"}, meter={"stride": 7}).stride == 7


@pytest.mark.parametrize(
    ("quantizer", "asked", "tier"),
    [
        ("int4_token_group", "auto", "deterministic"),
        ("int8_dither", "auto", "probabilistic"),
        ("int8_dither_w", "auto", "probabilistic"),
        ("int8_dither", "deterministic", "deterministic"),
        ("int8_dither", "probabilistic", "probabilistic"),
    ],
)
def test_tier(quantizer: str, asked: str, tier: str) -> None:
    assert policy(quantizer, meter={"tier": asked}).tier == tier


def test_it_builds_what_it_names() -> None:
    p = parse_policy(
        {
            "version": 1,
            "quantizer": {"name": "int4_token_group", "params": {"group_size": 64}},
            "gate": {"kind": "combined", "tau": 0.3, "tau_out": 0.4, "risk_tau": 2.0, "target": "tv"},
        }
    )
    assert (p.resolved_quantizer.name, p.resolved_quantizer.bytes_per_token_head(128)) == (
        "int4_token_group",
        144.0,
    )
    assert p.resolved_gate == Combined("tv", 0.3, 0.4, 2.0)


@pytest.mark.parametrize(
    ("written", "layers"),
    [
        ("null", None),
        ("3", (3,)),
        ("0-3", (0, 1, 2, 3)),
        ('[7, "0-2", 1]', (0, 1, 2, 7)),
        ("[4 - 5, 2]", (2, 4, 5)),
    ],
)
def test_layer_lists(written: str, layers: tuple[int, ...] | None) -> None:
    data = yaml.load(f"version: 1\nquantizer: {{name: none, layers: {written}}}", Loader=PolicyLoader)
    assert parse_policy(data).quantizer.layers == layers


@settings(deadline=None)
@given(st.sets(st.integers(0, 40), min_size=1))
def test_layer_ids_and_their_ranges_agree(layers: set[int]) -> None:
    runs = [[layer, layer] for layer in sorted(layers)]
    written = [f"{a}-{b}" for a, b in runs]
    p = parse_policy(
        {"version": 1, "quantizer": {"name": "none", "layers": written}, "meter": {"layers": list(layers)}}
    )
    assert p.quantizer.layers == p.meter.layers == tuple(sorted(layers))


def test_layers_of_a_model() -> None:
    p = policy(meter={"layers": [1, 5]})
    assert p.quantizer.layers_of(range(6)) == tuple(range(6))
    assert p.meter.layers_of(range(6)) == (1, 5)
    with pytest.raises(PolicyError, match=r"meter\.layers: names layer 5, but the model's attention layers are 0-4"):
        p.meter.layers_of(range(5))
    with pytest.raises(PolicyError, match=r"names layer 1, but the model's attention layers are \[3, 5, 9\]"):
        p.meter.layers_of([3, 5, 9])


def test_a_policy_cannot_be_changed() -> None:
    p = policy()
    with pytest.raises(ValueError, match="frozen"):
        p.gate.tau = 0.9
    with pytest.raises(ValueError, match="frozen"):
        p.meter = p.meter


def test_a_policy_made_in_python_is_refused_in_the_words_of_the_file() -> None:
    with pytest.raises(PolicyError, match=r"^gate\.tau: is -1; allowed: greater than 0$"):
        Policy(version=1, quantizer={"name": "none"}, gate={"tau": -1})
    with pytest.raises(PolicyError, match=r"^quantizer\.name: unknown quantizer 'int8_diter' \(did you mean"):
        Policy(version=1, quantizer={"name": "int8_diter"})
    with pytest.raises(PolicyError, match=r"is no path; a policy that is no file is made by Policy\("):
        load_policy({"version": 1})  # type: ignore[arg-type]


def test_a_checked_policy_survives_a_round_trip() -> None:
    p = policy(gate={"kind": "combined"}, meter={"layers": ["0-2"]})
    again = parse_policy(p.model_dump())
    assert again == p


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid_and_commented(preset: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(preset_text(preset))
    p = load_policy(path)
    expected = {
        "observe": ("fp8_e4m3_cast", "deterministic", "observe", 32),
        "int8": ("int8_dither", "probabilistic", "observe", 32),
        "gated": ("int4_token_group", "deterministic", "combined", 1),
    }[preset]
    assert (p.quantizer.name, p.tier, p.gate.kind, p.stride) == expected
    assert preset_text(preset).count("#") >= 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": is empty, expected a mapping"),
        ("- 1", r": holds \[1\], expected a mapping"),
        ("version: 1\nquantizer: {name: none", ": not valid YAML: .*line 2"),
        (
            "version: 1\nquantizer: {name: none}\nversion: 1",
            ": not valid YAML: the key 'version' stands there twice",
        ),
        ("version: 1\nquantizer: {name: none}\ngate: {tau: .1, tau: .2}", "the key 'tau' stands there twice"),
        ("version: 1\nquantizer: !!python/object:os.system {}", ": not valid YAML"),
    ],
)
def test_bad_files(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(PolicyError, match=message) as raised:
        load_policy(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"missing\.yaml: cannot be read: No such file"):
        load_policy(tmp_path / "missing.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"version: \xff")
    with pytest.raises(PolicyError, match="not UTF-8 text"):
        load_policy(tmp_path / "latin.yaml")


@pytest.mark.parametrize(("written", "delta"), [("1e-3", 1e-3), ("1.0e-3", 1e-3), ("5E-2", 0.05), ("0.01", 0.01)])
def test_numbers_are_numbers(written: str, delta: float, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(f"version: 1\nquantizer: {{name: none}}\nmeter: {{delta: {written}}}")
    assert load_policy(path).meter.delta == delta
