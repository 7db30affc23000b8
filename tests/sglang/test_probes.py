"""Probes of a real server with two ranks: enabled, answered, ended, and refused to those who may not ask."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Metered, samples_of_each_task, write_policy
from witcert_demo.servers import running_server

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="each rank is bound to a core of its own"),
]
PROMPT = samples_of_each_task(1, num_tokens=96)[0].prompt


@pytest.fixture(scope="module")
def server(twin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metered]:
    work = tmp_path_factory.mktemp("probes")
    policy = write_policy(
        work / "policy.yaml",
        quantizer={"name": "int4_token_group"},
        meter={"stride": "never"},
        report={"control": True},
    )
    options = ["--dtype", "float32", "--disable-radix-cache", "--tp-size", "2", "--sleep-on-idle"]
    options += ["--api-key", "user", "--admin-api-key", "admin"]
    bind = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with running_server(twin, policy=policy, log=work / "log", options=options, environment=bind) as running:
        yield Metered(running, work / "none")


@pytest.fixture
def admin(server: Metered) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.server.url, timeout=60, headers={"Authorization": "Bearer admin"}) as client:
        yield client


def generate(server: Metered, rid: str) -> dict[str, Any]:
    """The summary of a request of eight tokens."""
    asked = {"text": PROMPT, "rid": rid, "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}
    with httpx.Client(timeout=120, headers={"Authorization": "Bearer user"}) as client:
        found: dict[str, Any] = client.post(f"{server.server.url}/generate", json=asked).json()["meta_info"]["witcert"]
    return found


def test_a_probe_meters_the_rows_it_asks_for_on_all_ranks(server: Metered, admin: httpx.Client) -> None:
    assert generate(server, "before")["rows_metered"] == 0
    text = 'max(bound) by layer where request startswith "chosen" and prompt > 8 and lora == "" every 2 for 3 rows'
    enabled = admin.post("/witcert/probes", json={"probe": text})
    assert enabled.status_code == 201
    name = enabled.json()["id"]
    assert generate(server, "other")["rows_metered"] == 0
    summary = generate(server, "chosen-1")
    assert summary["rows_metered"] == 3
    found = admin.get(f"/witcert/probes/{name}").json()
    assert (found["rows"], found["ended"], found["unknown"]) == (3, "rows", {})
    for group in found["groups"]:
        layer = summary["worst_by_layer_head"][group["by"]["layer"]]
        assert group["max"] == max(layer) > 0
        assert group["cells"] == 3 * len(layer)
    assert generate(server, "chosen-2")["rows_metered"] == 0
    assert f"probe {name} enabled, sha256 " in server.server.log_text()


def test_a_probe_ends_when_its_time_is_up_and_is_forgotten_when_told(server: Metered, admin: httpx.Client) -> None:
    text = "top(2, bound) for 1 seconds"
    name = admin.post("/witcert/probes", json={"probe": text}).json()["id"]
    deadline = time.monotonic() + 60
    while not (found := admin.get(f"/witcert/probes/{name}").json())["ended"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert found["ended"] == "seconds"
    other = admin.post("/witcert/probes", json={"probe": "count()"}).json()["id"]
    summary = generate(server, "whole")
    told = admin.delete(f"/witcert/probes/{other}").json()
    assert (told["ended"], told["rows"]) == ("told to", summary["rows_metered"])
    assert admin.get(f"/witcert/probes/{other}").status_code == 404
    assert other not in [one["id"] for one in admin.get("/witcert/probes").json()]
    assert generate(server, "after")["rows_metered"] == 0


def test_who_may_not_ask_and_what_cannot_be_asked(server: Metered, admin: httpx.Client) -> None:
    for key in (None, "user"):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=server.server.url, headers=headers) as client:
            assert client.post("/witcert/probes", json={"probe": "count()"}).status_code == 401
            assert client.get("/witcert/probes").status_code == 401
    mistake = admin.post("/witcert/probes", json={"probe": "max(bond)"})
    assert (mistake.status_code, mistake.json()["column"]) == (400, 5)
    assert "did you mean 'bound'?" in mistake.json()["error"]
    for body, status in ((b"{", 400), (b'{"probe": 1}', 400), (b'{"probe": "%s"}' % (b"x" * 20000), 413)):
        assert admin.post("/witcert/probes", content=body).status_code == status
    assert admin.get("/witcert/probes/nobody").status_code == 404
    assert admin.delete(f"/witcert/probes/{'0' * 16}").status_code == 404
