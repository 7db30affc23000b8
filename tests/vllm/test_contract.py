"""vLLM's private names are what the adapter takes them for; the one that is not is named, also by the doctor."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import witcert_vllm
from witcert_vllm import plugin
from witcert_vllm.contract import CONTRACT
from witcert_vllm.doctor import examine, of_model

from witcert_core.policy.model import parse_policy
from witcert_core.serving.contract import Members, Signature, broken

pytestmark = pytest.mark.vllm

POLICY = parse_policy({"version": 1, "quantizer": {"name": "int8_dither"}, "meter": {"layers": [0, 1]}})


def test_vllm_keeps_the_contract() -> None:
    assert broken(CONTRACT) == []
    assert broken(Signature(hook.target, hook.parameters) for hook in plugin.hooks()) == []


def test_the_name_that_changed_is_named() -> None:
    signature = Signature("vllm.v1.core.sched.scheduler.Scheduler.finish_requests", ("self", "rids"))
    fields = Members("vllm.v1.outputs.KVConnectorOutput", ("worker_meta",))
    changed, gone = broken([signature, fields])
    assert changed.startswith("vllm.v1.core.sched.scheduler.Scheduler.finish_requests: takes (self, request_ids")
    assert gone == "vllm.v1.outputs.KVConnectorOutput.worker_meta: no longer there"
    (missing,) = broken([Signature("vllm.v1.core.sched.scheduler.Scheduler.no_such", ())])
    assert missing.startswith("vllm.v1.core.sched.scheduler.Scheduler.no_such: ")


def test_every_name_imported_from_vllm_is_in_the_contract() -> None:
    known = {entry.target for entry in CONTRACT} | {
        f"{entry.target}.{name}" for entry in CONTRACT if isinstance(entry, Members) for name in entry.names
    }
    imported = set()
    for file in Path(witcert_vllm.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert len(imported) > 15
    assert [name for name in sorted(imported) if not any(f"{k}.".startswith(f"{name}.") for k in known)] == []


def test_the_doctor(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WITCERT_POLICY", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    found = examine(str(checkpoint), POLICY)
    assert [f for f in found if f.level == "refused"] == []
    said = {f.subject: f.text for f in found}
    assert "private names of vLLM are as expected" in said["contract"]
    assert said["metered"].startswith("2 of 4 layers x 4 query heads: 8 cells a row, tier probabilistic")
    assert "WITCERT_POLICY is not set" in said["switch"]
    assert said["memory"] == "168 B of witnesses a token beside 2.0 KiB of keys and values"
    assert ("note", "not metered", "layers [2, 3]: left out by meter.layers") in [
        (finding.level, finding.subject, finding.text) for finding in found
    ]
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
