"""vLLM's private names are what the adapter takes them for; the one that is not is named, also by the doctor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from witcert_vllm import contract
from witcert_vllm.doctor import examine, of_model

from witcert_core.policy.model import parse_policy

pytestmark = pytest.mark.vllm

POLICY = parse_policy({"version": 1, "quantizer": {"name": "int8_dither"}, "meter": {"layers": [0, 1]}})


def test_vllm_keeps_the_contract() -> None:
    assert contract.broken() == []


def test_the_name_that_changed_is_named() -> None:
    signatures = {"vllm.v1.core.sched.scheduler.Scheduler.finish_requests": ("self", "rids")}
    fields = {"vllm.v1.outputs.KVConnectorOutput": ("worker_meta",)}
    changed, gone = contract.broken(signatures, fields)
    assert changed.startswith("vllm.v1.core.sched.scheduler.Scheduler.finish_requests: takes (self, request_ids")
    assert gone == "vllm.v1.outputs.KVConnectorOutput.worker_meta: no longer there"
    (missing,) = contract.broken({"vllm.v1.core.sched.scheduler.Scheduler.no_such": ()}, {})
    assert missing.startswith("vllm.v1.core.sched.scheduler.Scheduler.no_such: ")


def test_the_doctor(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WITCERT_POLICY", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    found = examine(str(checkpoint), POLICY)
    assert [f for f in found if f.level == "refused"] == []
    said = {f.subject: f.text for f in found}
    assert "private names of vLLM are as expected" in said["contract"]
    assert said["metered"].startswith("2 of 4 layers x 4 query heads: 8 cells a row, tier probabilistic")
    assert "WITCERT_POLICY is not set" in said["switch"]
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert [f.subject for f in examine(None, POLICY) if f.level == "refused"] == ["plugin"]


def test_the_doctor_names_what_is_no_model_and_more_outliers_than_a_head_has(checkpoint: Path, tmp_path: Path) -> None:
    wrong_type = {**json.loads((checkpoint / "config.json").read_text()), "num_hidden_layers": "four"}
    contents: list[Any] = [{}, [], None, wrong_type]
    for content in contents:
        (tmp_path / "config.json").write_text(json.dumps(content))
        (finding,) = of_model(str(tmp_path), POLICY)
        assert (finding.level, finding.subject) == ("refused", "model")
        assert str(tmp_path) in finding.text
        assert "\n" not in finding.text
        assert "input_value" not in finding.text
    quantizer = {"name": "int8_dither_bypass", "storage": "packed", "params": {"pairs": 999}}
    *_, last = of_model(str(checkpoint), parse_policy({"version": 1, "quantizer": quantizer}))
    assert last.level == "refused"
    assert last.subject == "outliers"
