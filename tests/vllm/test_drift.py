"""`witcert eval drift` at a running server of vLLM, which scores its own texts by exact keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from conftest import prompts
from servers import running_server

from witcert_core.cli import main

pytestmark = pytest.mark.vllm


def test_a_server_scores_its_own_texts_by_exact_keys(
    twin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = prompts(seed=5)
    (tmp_path / "prompts.txt").write_text("\n".join(asked))
    (tmp_path / "cut.txt").write_text(" ".join(asked))
    policy = tmp_path / "policy.yaml"
    policy.write_text(yaml.safe_dump({"version": 1, "quantizer": {"name": "fp8_e4m3_cast"}, "meter": {"stride": 1}}))
    options = ["--max-num-batched-tokens", "300"]
    command = ["eval", "drift", "--tokens", "12", "--out", str(tmp_path / "found")]
    with running_server(twin, policy=policy, log=tmp_path / "log", options=options, VLLM_CPU_CI_ENV="1") as server:
        for _ in range(2):  # the second time its prompts and answers are cached, quantized
            assert main([*command, "--url", server.url, "--prompts", str(tmp_path / "prompts.txt")]) == 0
        assert main([*command, "--url", server.url, "--prompts", str(tmp_path / "cut.txt")]) == 2
    assert "read the quantized cache: the prompt was cut into chunks" in capsys.readouterr().err
    found = json.loads((tmp_path / "found" / "drift.json").read_text())
    fp8 = found["quantizers"]["fp8_e4m3_cast"]
    assert (found["schema"], found["about"]["samples"]) == ("witcert.drift/1", len(asked))
    assert fp8["kl"]["value"] > 0.01
    assert fp8["unchanged"]["value"] < 1.0
    assert all(row["meter"]["cells_measured"] > 0 for row in fp8["samples"])
