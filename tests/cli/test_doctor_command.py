"""`witcert doctor`: what adapters find is shown, and a refusal is an exit code."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from witcert_core.cli import main
from witcert_core.policy import entry_points
from witcert_core.policy.model import Policy
from witcert_core.serving import doctor
from witcert_core.serving.doctor import Finding

ASKED: list[tuple[str | None, str]] = []


def examine_well(model: str | None, policy: Policy) -> list[Finding]:
    ASKED.append((model, policy.quantizer.name))
    return [Finding("ok", "hooks", "all live"), Finding("note", "switch", "off")]


def examine_badly(model: str | None, policy: Policy) -> list[Finding]:
    return [Finding("ok", "version", "1.0"), Finding("refused", "model", "uses MLA")]


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("WITCERT_POLICY", raising=False)
    found = {
        name: EntryPoint(name, f"{__name__}:{function}", entry_points.ENGINES)
        for name, function in (("sglang", "examine_well"), ("other", "examine_badly"), ("torn", "no_such"))
    }
    monkeypatch.setattr(doctor, "installed_engines", lambda: found)
    monkeypatch.setattr("witcert_core.cli.doctor.installed_engines", lambda: found)
    return found


def test_findings_are_shown_and_the_policy_named(
    adapters: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--engine", "sglang", "--model", str(tmp_path)]) == 0
    assert ASKED[-1] == (str(tmp_path), "fp8_e4m3_cast")
    assert "preset observe" in capsys.readouterr().out
    path = tmp_path / "p.yaml"
    path.write_text("{version: 1, quantizer: {name: int8_dither}}")
    assert main(["doctor", "--engine", "sglang", "--policy", str(path)]) == 0
    assert ASKED[-1:] == [(None, "int8_dither")]
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"policy   {path}", "ok       sglang: hooks: all live", "note     sglang: switch: off"]


def test_a_configuration_alone_is_described(adapters: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 3}
    file.write_text(json.dumps({"model_type": "new", "architectures": ["NewForCausalLM"], **sizes}))
    assert main(["doctor", "--engine", "sglang", "--model", str(file)]) == 0
    said = "model    NewForCausalLM (new): 3 x full attention: 2 KV heads of 32 channels"
    assert said in capsys.readouterr().out.splitlines()


def test_the_policy_of_the_environment(
    adapters: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("{version: 1, quantizer: {name: int2_token_group}}")
    monkeypatch.setenv("WITCERT_POLICY", str(path))
    assert main(["doctor", "--engine", "sglang"]) == 0
    assert ASKED[-1] == (None, "int2_token_group")
    assert f"{path} ($WITCERT_POLICY)" in capsys.readouterr().out


def test_a_model_out_of_reach_is_refused_and_the_rest_examined(
    adapters: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "unreachable_hub", lambda model: f"{model} cannot be reached")
    assert main(["doctor", "--engine", "sglang", "--model", "m"]) == 1
    assert ASKED[-1][0] is None
    assert "refused  sglang: model: m cannot be reached" in capsys.readouterr().out


def test_no_adapter_at_all_is_a_refusal(adapters: Any, capsys: pytest.CaptureFixture[str]) -> None:
    adapters.clear()
    assert main(["doctor"]) == 1
    assert "pip install ./adapters/sglang" in capsys.readouterr().out


def test_a_refusal_is_an_exit_code(adapters: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--engine", "other"]) == 1
    assert "refused  other: model: uses MLA" in capsys.readouterr().out


def test_an_engine_without_an_adapter_is_one_line(adapters: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--engine", "vllm"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "vllm" in line]
    assert "witcert-vllm is not installed" in line


def test_without_an_engine_all_installed_ones_are_examined(adapters: Any, capsys: pytest.CaptureFixture[str]) -> None:
    del adapters["torn"]
    assert main(["doctor"]) == 1
    assert {"sglang:", "vllm:", "other:"} <= set(capsys.readouterr().out.split())
    del adapters["other"]
    assert main(["doctor"]) == 0


def test_what_cannot_be_examined_is_a_users_error(adapters: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--engine", "sglan"]) == 2
    assert "did you mean 'sglang'" in capsys.readouterr().err
    assert main(["doctor", "--engine", "torn"]) == 2
    assert "no_such" in capsys.readouterr().err
