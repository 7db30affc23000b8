"""The other metered backend: SGLang's Triton attention, run by Triton's interpreter where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ask_many, samples_of_each_task, write_policy
from witcert_demo.servers import running_server

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("reads", ["chunk_exact", "stored"])
def test_triton_backend(checkpoint: Path, tmp_path: Path, reads: str) -> None:
    policy = write_policy(
        tmp_path / "policy.yaml",
        quantizer={"name": "int8_token_group"},
        prefill_reads=reads,
        meter={"stride": 1, "audit_every": 1, "max_rows": 4},
    )
    options = ["--dtype", "float32", "--attention-backend", "triton"]
    interpreted = {"TRITON_INTERPRET": "1"}
    with running_server(
        checkpoint, policy=policy, log=tmp_path / "log", options=options, environment=interpreted
    ) as server:
        asked = ask_many(server, samples_of_each_task(1, num_tokens=64))
    assert all(a.right for a in asked)
    summaries = [a.summary for a in asked if a.summary is not None]
    assert len(summaries) == len(asked)
    assert sum(s["audit"]["cells"] for s in summaries) >= 3 * 3 * 16
    assert sum(s["audit"]["violations"] + s["audit"]["mismatches"] for s in summaries) == 0
    assert "TritonAttnBackend" in server.log_text()
