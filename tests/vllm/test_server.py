"""A metered `vllm serve`, compiled, its worker in a process of its own: what clients and operators are told."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from conftest import prompts
from engine import HEADS, LAYERS, write_policy
from servers import running_server
from witcert_demo.servers import Server

from witcert_core.cli import main

pytestmark = pytest.mark.vllm
KEY, OTHER_KEY = "a client's key", "another client's"


@pytest.fixture(scope="module")
def server(twin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The twin with fp8_e4m3_cast, every row metered and audited; it asks for one of two keys."""
    work = tmp_path_factory.mktemp("server")
    policy = write_policy(
        work / "policy.yaml",
        quantizer={"name": "fp8_e4m3_cast"},
        meter={"stride": 1, "audit_every": 1},
        report={"jsonl": str(work / "records.jsonl"), "cells": "worst"},
    )
    template = work / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    options = ["--served-model-name", "m", "--chat-template", str(template), "--enable-scale-out"]
    options += ["--api-key", KEY, OTHER_KEY]
    # Dynamo traces and vLLM compiles, but no C++ compiler runs: half a minute less.
    with running_server(twin, policy=policy, log=work / "log", options=options, VLLM_CPU_CI_ENV="1") as server:
        yield replace(server, key=KEY)


def complete(server: Server, prompt: str | list[str], **options: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 6, "temperature": 0, **options}
    with server.client() as client:
        answer: dict[str, Any] = client.post("/v1/completions", json=body).raise_for_status().json()
    return answer


def fetch(server: Server, path: str) -> Any:
    with server.client() as client:
        return client.get(path)


def schema(name: str) -> dict[str, Any]:
    return dict(json.loads((files("witcert_core") / "report" / "schema" / f"{name}.schema.json").read_text()))


def test_an_answer_carries_its_summary(server: Server) -> None:
    answer = complete(server, prompts(seed=3)[0])
    (summary,) = answer["kv_transfer_params"]["witcert"]
    jsonschema.validate(summary, schema("request"))
    assert summary["engine"] == "vllm"
    assert summary["request_id"].startswith(answer["id"])
    # Every generated token but the last is read by one row; a first chunk reads nothing quantized.
    assert summary["rows_metered"] == answer["usage"]["completion_tokens"] - 1
    assert summary["cells_measured"] == summary["rows_metered"] * LAYERS * HEADS
    assert summary["cells_unknown"] == 0
    assert summary["audit"]["violations"] == summary["audit"]["mismatches"] == 0
    assert summary["worst"]["meter"] > 0.2  # this cache damages this model
    assert fetch(server, f"/witcert/requests/{answer['id']}").json() == summary
    assert fetch(server, f"/witcert/requests/{summary['request_id']}").json() == summary


def test_several_choices_have_a_summary_each(server: Server) -> None:
    answer = complete(server, prompts(seed=4)[0], n=2, temperature=1.0, ignore_eos=True)
    summaries = answer["kv_transfer_params"]["witcert"]
    assert len({s["request_id"] for s in summaries}) == 2
    assert fetch(server, f"/witcert/requests/{answer['id']}").json() == summaries


def stream(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a greedy answer."""
    limit = {} if "max_output_tokens" in body else {"max_tokens": 6}
    body = {"model": "m", **limit, "temperature": 0, "stream": True, **body}
    with server.client() as client:
        lines = client.post(path, json=body).raise_for_status().text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def test_a_chat_is_answered_alike(server: Server) -> None:
    messages = [{"role": "user", "content": prompts(seed=8)[0]}]
    body = {"model": "m", "messages": messages, "max_tokens": 6, "temperature": 0}
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    (summary,) = answer["kv_transfer_params"]["witcert"]
    assert summary["rows_metered"] == answer["usage"]["completion_tokens"] - 1
    chunks = stream(server, "/v1/chat/completions", messages=messages)
    streamed = fetch(server, f"/witcert/requests/{chunks[0]['id']}").json()
    assert streamed["worst"]["meter"] == pytest.approx(summary["worst"]["meter"])


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/invocations", "/inference/v1/generate"])
def test_an_answer_of_another_route_carries_its_summary_and_is_found_by_its_id(server: Server, path: str) -> None:
    """A response is found without the number of its turn, a message by the id of Anthropic's protocol; streams too."""
    prompt = prompts(seed=12)[0]
    body: dict[str, Any] = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": prompt}]}
    if path == "/v1/responses":
        body = {"model": "m", "input": prompt, "max_output_tokens": 4}
    if path == "/inference/v1/generate":
        body = {"model": "m", "token_ids": [5, 6, 7, 8] * 20, "sampling_params": {"max_tokens": 4}}
    with server.client() as client:
        answer = client.post(path, json=body).raise_for_status().json()
    (summary,) = answer["kv_transfer_params"]["witcert"]
    jsonschema.validate(summary, schema("request"))
    answer_id = answer["request_id" if path == "/inference/v1/generate" else "id"]
    assert fetch(server, f"/witcert/requests/{answer_id}").json() == summary
    assert fetch(server, f"/witcert/requests/{summary['request_id']}").json() == summary
    if path in ("/v1/responses", "/v1/messages"):
        first = stream(server, path, **body)[0]
        answer_id = (first.get("message") or first.get("response") or first)["id"]
        assert fetch(server, f"/witcert/requests/{answer_id}").json()["rows_metered"] > 0


def test_a_batch_of_chats_is_found_by_its_id(server: Server) -> None:
    chats = [[{"role": "user", "content": prompts(seed=seed)[0]}] for seed in (14, 15)]
    with server.client() as client:
        body = {"model": "m", "messages": chats, "max_tokens": 3, "temperature": 0}
        answer = client.post("/v1/chat/completions/batch", json=body).raise_for_status().json()
    found = fetch(server, f"/witcert/requests/{answer['id']}").json()
    assert len({summary["request_id"] for summary in found}) == 2


def test_several_prompts_are_found_by_their_answer(server: Server) -> None:
    answer = complete(server, [prompts(seed=seed)[0] for seed in (9, 10)], n=2, temperature=1.0)
    found = fetch(server, f"/witcert/requests/{answer['id']}").json()
    assert answer["kv_transfer_params"]["witcert"] == found[:2]  # vLLM keeps those of the first prompt
    assert len({summary["request_id"] for summary in found}) == 4
    assert fetch(server, f"/witcert/requests/{answer['id']}?choice=3").json() == found[3]
    assert fetch(server, f"/witcert/requests/{answer['id']}?choice=4").status_code == 404


def test_a_streamed_answer_is_found_by_its_id(server: Server) -> None:
    # Chunks are not tokens: vLLM joins the tokens a slow reader has not taken yet.
    usage = {"include_usage": True}
    chunks = stream(server, "/v1/completions", prompt=prompts(seed=5)[0], stream_options=usage)
    summary = fetch(server, f"/witcert/requests/{chunks[0]['id']}").json()
    assert summary["rows_metered"] == chunks[-1]["usage"]["completion_tokens"] - 1
    missing = fetch(server, "/witcert/requests/nobody")
    assert missing.status_code == 404
    assert "nobody" in missing.json()["error"]


def test_an_id_may_have_slashes(server: Server) -> None:
    body = {"model": "m", "prompt": prompts(seed=11)[0], "max_tokens": 2}
    with server.client() as client:
        answer = client.post("/v1/completions", json=body, headers={"X-Request-Id": "team/7"}).json()
    assert fetch(server, "/witcert/requests/cmpl-team/7").json() == answer["kv_transfer_params"]["witcert"][0]


def test_an_id_that_another_begins_with_finds_nothing(server: Server) -> None:
    """Clients name their requests: whoever asks for a part of a name must not get at what others asked."""
    for name in ("team-1", "team_1"):
        body = {"model": "m", "prompt": prompts(seed=16)[0], "max_tokens": 2}
        with server.client() as client:
            answer = client.post("/v1/completions", json=body, headers={"X-Request-Id": name}).json()
        assert answer["id"] == f"cmpl-{name}"
        assert fetch(server, f"/witcert/requests/cmpl-{name}").status_code == 200
    for part in ("cmpl-team", "cmpl-team-", "cmpl", "team-1", "resp", ""):
        assert fetch(server, f"/witcert/requests/{part}").status_code == 404, part


def test_an_id_that_is_used_again_speaks_of_its_last_answer(server: Server) -> None:
    found = []
    for asked in ([prompts(seed=17)[0]] * 2, [prompts(seed=17)[0]]):
        body = {"model": "m", "prompt": asked, "max_tokens": 2}
        with server.client() as client:
            client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"}).raise_for_status()
        found.append(fetch(server, "/witcert/requests/cmpl-mine").json())
    first, last = found
    assert last["request_id"] not in [summary["request_id"] for summary in first]


def test_who_may_ask(server: Server) -> None:
    """Whoever may ask the server for an answer, with any of its keys; vLLM guards paths of its own only."""
    answer = complete(server, prompts(seed=18)[0], max_tokens=2)
    routes = ["/witcert/status", f"/witcert/requests/{answer['id']}", "/v1/models"]

    def codes(value: str | None, method: str = "GET") -> list[int]:
        headers = {} if value is None else {"Authorization": value}
        return [httpx.request(method, server.url + route, headers=headers).status_code for route in routes]

    for refused in (None, "", KEY, f"Basic {KEY}", "Bearer wrong", f"Bearer {KEY}x"):
        assert codes(refused) == [401, 401, 401], refused
    for key in (KEY, OTHER_KEY):
        assert codes(f"Bearer {key}") == codes(f"bearer {key}") == [200, 200, 200]
    for method in ("HEAD", "OPTIONS", "POST"):
        said = httpx.request(method, server.url + routes[1])
        assert said.status_code == 405
        assert "witcert" not in said.text


def test_all_who_ask_at_once_get_the_status(server: Server) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: fetch(server, "/witcert/status").raise_for_status().json(), range(32)))
    assert all(status == answers[0] for status in answers)


def test_odd_ids_get_one_line(server: Server) -> None:
    for name, status in (("i" * 60_000, 414), ("%00", 404), ("%ff%fe", 404), ("..%2f..%2fetc", 404), ("", 404)):
        answer = fetch(server, f"/witcert/requests/{name}")
        assert answer.status_code == status
        assert len(answer.json()["error"]) < 200
        assert "\n" not in answer.json()["error"]


def eventually_found(server: Server, answer_id: str) -> dict[str, Any]:
    """The summary of a request that vLLM's scheduler hears of after its client."""
    for _ in range(100):
        found = fetch(server, f"/witcert/requests/{answer_id}")
        if found.status_code == 200:
            break
        time.sleep(0.1)
    summary: dict[str, Any] = found.raise_for_status().json()
    return summary


def test_a_client_that_leaves_is_reported(server: Server) -> None:
    body = {"model": "m", "prompt": prompts(seed=6)[0], "max_tokens": 600, "ignore_eos": True, "stream": True}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
        first = next(line for line in response.iter_lines() if line.startswith("data: {"))
    answer_id = json.loads(first.removeprefix("data: "))["id"]
    summary = eventually_found(server, answer_id)
    assert summary["finish_reason"] == "abort"
    records = [json.loads(line) for line in server.log.with_name("records.jsonl").read_text().splitlines()]
    assert summary in records


def test_an_answer_ended_by_a_stop_string_is_found_by_its_id(server: Server) -> None:
    answer = complete(server, prompts(seed=13)[0], stop=[" "], ignore_eos=True, max_tokens=600)
    assert answer["choices"][0]["finish_reason"] == "stop"
    summary = eventually_found(server, answer["id"])
    assert summary["finish_reason"] == "abort"
    assert summary["rows_metered"] >= answer["usage"]["completion_tokens"] - 1


def test_prometheus(server: Server) -> None:
    (summary,) = complete(server, prompts(seed=7)[0])["kv_transfer_params"]["witcert"]

    def value(pattern: str) -> float:
        found = re.search(rf"^{pattern} (\S+)$", fetch(server, "/metrics").text, re.M)
        assert found, f"{pattern} not in /metrics"
        return float(found[1])

    assert value(r'witcert_cells_total\{[^}]*status="measured"[^}]*\}') >= summary["cells_measured"]
    assert value(r"witcert_audit_violations_total\{[^}]*\}") == 0
    assert value(r"witcert_audited_cells_total\{[^}]*\}") >= summary["audit"]["cells"]
    assert value(r"witcert_requests_total\{[^}]*\}") >= 1


def test_banner_and_status(server: Server) -> None:
    log = server.log_text()
    assert "WitCert meters this server: fp8_e4m3_cast in a float32 pool, CPU_ATTN" in log
    assert "16 (4 of 4 layers x 4 query heads)" in log
    status = fetch(server, "/witcert/status").json()
    assert status["layers_metered"] == [0, 1, 2, 3]
    assert {"witcert", "witcert-vllm", "vllm", "torch"} <= status["versions"].keys()
    assert status["bytes_witness"] > 0


def test_an_evaluation_asks_the_running_server(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`witcert eval ruler --url`: what is metered is read from the server, lengths from the model it serves."""
    monkeypatch.setenv("WITCERT_API_KEY", OTHER_KEY)
    command = ["eval", "ruler", "--url", server.url, "--tasks", "multi_key,multi_query", "--lengths", "128"]
    assert main([*command, "--samples", "2", "--no-plot", "--out", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert (row["quantizer"], row["mode"], row["engines"]) == ("fp8_e4m3_cast", "raw", ["vllm"])
    assert row["score"]["count"] == 4
    assert row["meter"]["audited"] == row["meter"]["cells_measured"] > 0 == row["meter"]["violations"]
