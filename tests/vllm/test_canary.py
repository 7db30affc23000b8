"""The canary at a running server of vLLM: under a request's own cache salt, in requests that carry its ids."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml
from conftest import prompts
from servers import running_server

from witcert_core.evaluate.canary import OWN, Canary, CanaryRun

pytestmark = pytest.mark.vllm
TOKENS = 8


def test_a_server_scores_a_share_of_its_traffic(twin: Path, tmp_path: Path) -> None:
    traffic, out, jsonl = tmp_path / "traffic.jsonl", tmp_path / "out.jsonl", tmp_path / "records.jsonl"
    traffic.touch()
    policy = tmp_path / "policy.yaml"
    sections = {"quantizer": {"name": "fp8_e4m3_cast"}, "meter": {"stride": 1}, "report": {"jsonl": str(jsonl)}}
    policy.write_text(yaml.safe_dump({"version": 1, **sections}))
    options = ["--max-num-batched-tokens", "300"]
    with running_server(twin, policy=policy, log=tmp_path / "log", options=options, VLLM_CPU_CI_ENV="1") as server:
        run = CanaryRun(server.url, traffic, out, 0.5, "127.0.0.1", 1, None, False, TOKENS, 1000, 1e6)
        said: list[str] = []
        canary = Canary(run, said.append)
        asked = {"model": str(twin), "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
        lines = []
        with server.client() as client:
            for number, prompt in enumerate(prompts(seed=5)[:2]):
                body = {**asked, "prompt": prompt, "cache_salt": f"tenant-{number}"}
                for _ in range(2):  # as the canary finds it: from a cached prefix
                    answer = client.post("/v1/completions", json=body).raise_for_status().json()
                ids = answer["choices"][0]["token_ids"]
                lines += [{"prompt": prompt, "text": ids, "id": f"r{number}", "cache_salt": f"tenant-{number}"}] * 2
        lines += [{**lines[0], "extra_key": "another engine's"}] * 2
        traffic.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        deadline = time.monotonic() + 60
        left_out = "witcert_canary_requests_left_out_total", {"reason": "cache"}
        while canary.metrics.registry.get_sample_value(*left_out) is None and time.monotonic() < deadline:
            canary.turn()
        canary.close()
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["request_id"] for record in found] == ["r0", "r1"], said
    for record in found:
        assert record["quantizer"] == "fp8_e4m3_cast"
        assert record["served"]["same"]
        assert record["drift"]["kl"] > 0.0
        assert record["meter"]["cells_measured"] > 0
    ids = [record["request_id"] for record in map(json.loads, jsonl.read_text().splitlines())]
    assert sum(OWN in name for name in ids) == 4  # each was written and scored once
    assert len(ids) == 8
