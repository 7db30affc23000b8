"""Probes of a real vLLM server: commands reach the worker and the scheduler's ledger, answers come back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import prompts
from engine import write_policy
from servers import running_server
from witcert_demo.servers import Server

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def server(twin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    work = tmp_path_factory.mktemp("probes")
    policy = write_policy(
        work / "policy.yaml",
        quantizer={"name": "int4_token_group"},
        meter={"stride": "never"},
        report={"control": True},
    )
    options = ["--served-model-name", "m", "--api-key", "key", "--no-enable-prefix-caching"]
    with running_server(twin, policy=policy, log=work / "log", options=options, VLLM_CPU_CI_ENV="1") as server:
        yield replace(server, key="key")


def complete(client: Any, prompt: str) -> dict[str, Any]:
    """The summary of a request of eight tokens."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body).raise_for_status().json()
    found: dict[str, Any] = answer["kv_transfer_params"]["witcert"][0]
    return found


def test_a_probe_meters_the_rows_it_asks_for(server: Server) -> None:
    prompt = prompts(1)[0]
    with server.client() as client:
        assert complete(client, prompt)["rows_metered"] == 0
        text = 'max(bound) by layer where prompt > 8 and lora == "" and phase == generated every 2 for 3 rows'
        enabled = client.post("/witcert/probes", json={"probe": text})
        assert enabled.status_code == 201
        summary = complete(client, prompt)
        assert summary["rows_metered"] == 3
        found = client.get(f"/witcert/probes/{enabled.json()['id']}").json()
        assert (found["rows"], found["ended"], found["unknown"]) == (3, "rows", {})
        for group in found["groups"]:
            layer = summary["worst_by_layer_head"][group["by"]["layer"]]
            assert group["max"] == max(layer) > 0
            assert group["cells"] == 3 * len(layer)
        assert complete(client, prompt)["rows_metered"] == 0
        metrics = client.get("/metrics").text
        assert 'witcert_rows_probed_total{why="probe"} 3.0' in metrics


def test_a_probe_ends_when_told_and_what_vllm_does_not_say_is_refused(server: Server) -> None:
    with server.client() as client:
        name = client.post("/witcert/probes", json={"probe": "count() for 60 seconds"}).json()["id"]
        told = client.delete(f"/witcert/probes/{name}").json()
        assert (told["ended"], told["rows"]) == ("told to", 0)
        assert complete(client, prompts(1)[0])["rows_metered"] == 0
        refused = client.post("/witcert/probes", json={"probe": "count() where priority > 1"})
        assert refused.status_code == 400
        assert "this engine does not say it" in refused.json()["error"]
