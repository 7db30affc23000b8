"""`witcert eval drift` at a running server, which scores its own texts by exact keys, against the offline engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import write_policy
from witcert_demo.servers import running_server
from witcert_demo.tasks import make_samples

from witcert_core.cli import main

pytestmark = pytest.mark.sglang
PROMPTS = [sample.prompt for sample in make_samples("multi_query", 256, 4, seed=5)]


def test_a_server_scores_its_own_texts_by_exact_keys(
    twin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    policy = write_policy(tmp_path / "policy.yaml", quantizer={"name": "fp8_e4m3_cast"})
    asked = ["eval", "drift", "--prompts", str(prompts), "--tokens", "12"]
    with running_server(
        twin,
        policy=policy,
        log=tmp_path / "log",
        options=["--dtype", "float32", "--chunked-prefill-size", "300"],
    ) as server:
        for out in ("served", "again"):  # the second time its prompts and answers are cached, quantized
            assert main([*asked, "--url", server.url, "--out", str(tmp_path / out)]) == 0
        cut = tmp_path / "cut.txt"
        cut.write_text(" ".join(PROMPTS))
        assert main([*asked[:3], str(cut), "--url", server.url, "--out", str(tmp_path / "cut")]) == 2
    assert "read the quantized cache: the prompt was cut into chunks" in capsys.readouterr().err
    (found,) = json.loads((tmp_path / "served" / "drift.json").read_text())["quantizers"].values()
    command = [*asked, "--model", str(twin), "--quantizers", "fp8_e4m3_cast", "--dtype", "float32"]
    assert main([*command, "--out", str(tmp_path / "offline")]) == 0
    (offline,) = json.loads((tmp_path / "offline" / "drift.json").read_text())["quantizers"].values()
    first = [[row["first_change"] for row in side["samples"]] for side in (found, offline)]
    assert first[0] == first[1]  # until texts part they are the same from both sides
    assert any(first[0])
    for ours, theirs in zip(found["samples"], offline["samples"], strict=True):
        if ours["first_change"] is None:
            assert ours["nll"] == pytest.approx(theirs["nll"], abs=1e-3)
    assert found["kl"]["value"] > 0.01
