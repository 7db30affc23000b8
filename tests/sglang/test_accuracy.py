"""The shipped model answers in SGLang itself with a 16-bit cache; without a policy nothing of ours runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import TASKS, ask_many, samples_of_each_task
from witcert_demo.servers import running_server

pytestmark = pytest.mark.sglang
COUNT = 20


def test_sixteen_bit_answers_and_no_trace_of_the_meter(checkpoint: Path, tmp_path: Path) -> None:
    with running_server(checkpoint, policy=None, log=tmp_path / "log", options=["--dtype", "bfloat16"]) as server:
        samples = samples_of_each_task(COUNT)
        asked = ask_many(server, samples)
        with server.client() as client:
            status = client.get("/witcert/status").status_code
            metrics = client.get("/metrics/").text
    right = {task: sum(a.right for s, a in zip(samples, asked, strict=True) if s.task == task) for task in TASKS}
    assert all(count >= 0.95 * COUNT for count in right.values()), right
    assert all(a.summary is None for a in asked)
    assert status == 404
    assert not re.search(r"^witcert_", metrics, re.M)
    assert "WitCert" not in server.log_text()
