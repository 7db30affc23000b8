"""`witcert meter` reports what it reported when it was recorded; see `recorded.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import recorded
import yaml
from witcert_demo.run import CHECKPOINT
from witcert_demo.tasks import make_samples

from witcert_core.cli import main

AUDITED = {"stride": 1, "audit_every": 1, "max_rows": 2}
SAMPLED = {"stride": 1, "max_rows": 2, "audit_share": 0.5, "sketch_share": 0.5, "share_seed": 3}
CASES: dict[str, dict[str, Any]] = {
    "fp8_e4m3_cast, rms": {"quantizer": {"name": "fp8_e4m3_cast", "layers": "1-3"}, "meter": {"form": "rms"}},
    "fp8_e5m2_cast, extremal": {"quantizer": {"name": "fp8_e5m2_cast"}, "meter": {"form": "extremal", "bands": 32}},
    "int4_token_group, sketched": {"quantizer": {"name": "int4_token_group"}, "meter": {"sketch_bits": 4}},
    "int4_token_group, risk_ranked": {
        "quantizer": {"name": "int4_token_group", "params": {"group_size": 16}},
        "meter": {"sketch_bits": 0},
        "gate": {"kind": "risk_ranked", "block_size": 8},
    },
    "int4_token_group, budget": {
        "quantizer": {"name": "int4_token_group"},
        "gate": {"kind": "certified", "max_pagein_bytes": 100_000, "on_exhausted": "abort"},
    },
    "int8_token_group, sampled": {"quantizer": {"name": "int8_token_group"}, "meter": SAMPLED},
    "int8_dither": {"quantizer": {"name": "int8_dither"}, "meter": {"declared_rows": 9, "stride": 2}},
    "kivi": {"quantizer": {"name": "kivi", "params": {"bits": 4, "residual": 32}}, "prefill_reads": "stored"},
    "kvquant": {"quantizer": {"name": "kvquant"}, "meter": {"layers": [0, "2-3"]}},
    "rotated": {"quantizer": {"name": "rotated"}},
    "skvq": {"quantizer": {"name": "skvq"}, "gate": {"kind": "combined", "target": "output"}},
    "nvfp4": {"quantizer": {"name": "nvfp4"}, "meter": {"sketch_bits": 2}},
    "fp8_calibrated": {"quantizer": {"name": "fp8_calibrated"}},
}


@pytest.mark.parametrize("case", CASES)
def test_meter(
    case: str, twin_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.randbits", lambda _bits: recorded.NONCE)
    sections = CASES[case]
    jsonl, policy, prompts = (tmp_path / name for name in ("records.jsonl", "policy.yaml", "prompts.txt"))
    meter = sections.get("meter", {}) if "sampled" in case else {**AUDITED, **sections.get("meter", {})}
    report = {"jsonl": str(jsonl), "cells": "all"}
    policy.write_text(yaml.safe_dump({"version": 1, **sections, "meter": meter, "report": report}))
    asked = [make_samples(task, 96, 1, 3)[0].prompt for task in ("multi_key", "variable_tracking")]
    prompts.write_text("\n".join(asked))
    model = CHECKPOINT if "dither" in case else twin_path
    command = ["meter", "--model", str(model), "--policy", str(policy), "--prompts", str(prompts), "--json"]
    assert main([*command, "--max-new-tokens", "6", "--dtype", "float32"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    records = [json.loads(line) for line in jsonl.read_text().splitlines()]
    found = [recorded.run_of(a["answer"], a["summary"], records) for a in answers]
    recorded.check("offline", case, found)
