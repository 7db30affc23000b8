"""A metered server with a damaging cache: what clients, operators and files are told about it."""

from __future__ import annotations

import json
import re
import time
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import jsonschema
import pytest
from conftest import ADMIN_KEY, KEY, Metered, ask_many, check_recorded, samples_of_each_task

from witcert_core.cli import main

pytestmark = pytest.mark.sglang
LAYERS, HEADS = 4, 4


def schema(name: str) -> dict[str, Any]:
    return dict(json.loads((files("witcert_core") / "report" / "schema" / f"{name}.schema.json").read_text()))


@pytest.fixture(scope="module")
def summaries(fp8_twin: Metered) -> list[dict[str, Any]]:
    """Summaries of 24 questions asked four at a time; the accuracy is checked on the way."""
    asked = ask_many(fp8_twin.server, samples_of_each_task(8))
    right = sum(a.right for a in asked)
    assert right < 0.4 * len(asked), f"{right} of {len(asked)} right: this cache should damage answers"
    found = [a.summary for a in asked if a.summary is not None]
    assert len(found) == len(asked)
    return found


def test_recorded(fp8_twin: Metered) -> None:
    check_recorded("fp8_e4m3_cast", fp8_twin)


def test_no_audited_cell_breaks_its_bound(summaries: list[dict[str, Any]]) -> None:
    assert sum(s["audit"]["cells"] for s in summaries) > 1000
    assert sum(s["audit"]["violations"] + s["audit"]["mismatches"] for s in summaries) == 0


def test_the_meter_sees_the_damage(summaries: list[dict[str, Any]]) -> None:
    measured = sum(s["cells_measured"] for s in summaries)
    certified = sum(s["tv_certified_cells"] for s in summaries)
    assert certified < 0.9 * measured
    assert max(s["audit"]["tv_max"] for s in summaries) > 0.2


def test_every_row_that_read_the_cache_is_accounted_for(summaries: list[dict[str, Any]]) -> None:
    for summary in summaries:
        assert summary["cells_measured"] + summary["cells_unknown"] == summary["rows_seen"] * LAYERS * HEADS
        assert set(summary["unknown_reasons"]) <= {"max_rows"}
        assert len(summary["worst_by_layer_head"]) == LAYERS
        assert all(len(row) == HEADS for row in summary["worst_by_layer_head"])


def test_summaries_and_cells_follow_their_schemas(fp8_twin: Metered, summaries: list[dict[str, Any]]) -> None:
    for summary in summaries:
        jsonschema.validate(summary, schema("request"))
    records = fp8_twin.records()
    cells = [r for r in records if r["schema"].startswith("witcert.cell")]
    requests = {r["request_id"]: r for r in records if r["schema"].startswith("witcert.request")}
    assert len(cells) >= sum(s["cells_measured"] for s in summaries)
    for cell in cells[:: max(1, len(cells) // 300)]:
        jsonschema.validate(cell, schema("cell"))
    for summary in summaries:
        assert requests[summary["request_id"]] == summary


def test_no_decode_row_is_missed(fp8_twin: Metered, summaries: list[dict[str, Any]]) -> None:
    """Every generated token but the last is read by one row, in a decode pass or inside a mixed chunk."""
    positions: dict[str, set[int]] = {}
    for record in fp8_twin.records():
        if record["schema"].startswith("witcert.cell") and record["status"] != "unknown":
            positions.setdefault(record["request_id"], set()).add(record["position"])
    for summary in summaries:
        decode = {p for p in positions[summary["request_id"]] if p >= 512}
        assert decode
        assert decode == set(range(512, 512 + len(decode)))


def test_prometheus(fp8_twin: Metered, summaries: list[dict[str, Any]]) -> None:
    with fp8_twin.server.client() as client:
        text = client.get("/metrics/").text

    def value(pattern: str) -> float:
        found = re.search(rf"^{pattern} (\S+)$", text, re.M)
        assert found, f"{pattern} not in /metrics"
        return float(found[1])

    measured = sum(s["cells_measured"] for s in summaries)
    assert value(r'witcert_cells_total\{[^}]*status="measured"[^}]*\}') >= measured
    assert value(r"witcert_audit_violations_total\{[^}]*\}") == 0
    assert value(r"witcert_audited_cells_total\{[^}]*\}") >= 1000


def test_openai_answer_and_route(fp8_twin: Metered) -> None:
    prompt = samples_of_each_task(1)[0].prompt
    with fp8_twin.server.client() as client:
        body = {"model": "m", "prompt": prompt, "max_tokens": 6, "temperature": 0}
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
        (summary,) = answer["metadata"]["witcert"]
        assert summary["request_id"] == answer["id"]
        assert client.get(f"/witcert/requests/{answer['id']}").json() == summary
        missing = client.get("/witcert/requests/nobody")
        assert missing.status_code == 404
        assert "nobody" in missing.json()["error"]


def streamed(metered: Metered, path: str, **body: Any) -> list[dict[str, Any]]:
    """The JSON of a stream's events, or of its lines."""
    with metered.server.client() as client:
        lines = client.post(path, json={**body, "stream": True}).raise_for_status().text.splitlines()
    return [json.loads(line) for line in (line.removeprefix("data: ") for line in lines) if line.startswith("{")]


def answered(metered: Metered, path: str, **body: Any) -> Any:
    with metered.server.client() as client:
        return client.post(path, json={**body, "stream": False}).raise_for_status().json()


def found(metered: Metered, name: str, **query: Any) -> Any:
    """What `/witcert/requests/{id}` answers, the id percent-encoded as a whole."""
    with metered.server.client() as client:
        return client.get(f"/witcert/requests/{quote(name, safe='')}", params=query).raise_for_status().json()


CHATS = ("/v1/chat/completions", "/invocations", "/v1/messages")


@pytest.mark.parametrize("path", ["/v1/completions", *CHATS])
def test_an_answer_carries_its_summary_and_is_found_by_its_id(fp8_twin: Metered, path: str) -> None:
    """Also as a stream: OpenAI's routes, SageMaker's and Anthropic's, whose messages have ids of their own."""
    prompt = samples_of_each_task(1)[0].prompt
    asked = {"messages": [{"role": "user", "content": prompt}]} if path in CHATS else {"prompt": prompt}
    body = {"model": "m", "max_tokens": 4, "temperature": 0, **asked}
    answer = answered(fp8_twin, path, **body)
    (summary,) = answer["metadata"]["witcert"]
    jsonschema.validate(summary, schema("request"))
    assert found(fp8_twin, answer["id"]) == found(fp8_twin, summary["request_id"]) == summary
    chunks = streamed(fp8_twin, path, **body)
    (carried,) = [chunk["metadata"]["witcert"] for chunk in chunks if "metadata" in chunk]
    answer_id = chunks[0]["message"]["id"] if path == "/v1/messages" else chunks[0]["id"]
    assert found(fp8_twin, answer_id) == carried[0]
    assert carried[0]["worst"]["meter"] == pytest.approx(summary["worst"]["meter"])


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_an_answer_without_an_id_carries_its_summary(fp8_twin: Metered, path: str) -> None:
    """Ollama's routes, as a stream too."""
    prompt = samples_of_each_task(1)[0].prompt
    asked = {"messages": [{"role": "user", "content": prompt}]} if path == "/api/chat" else {"prompt": prompt}
    body = {"model": "m", "options": {"num_predict": 4, "temperature": 0}, **asked}
    answer, lines = answered(fp8_twin, path, **body), streamed(fp8_twin, path, **body)
    assert answer["done"] is True
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert [index for index, line in enumerate(lines) if "metadata" in line] == [len(lines) - 1]
    for carried in (answer, lines[-1]):
        (summary,) = carried["metadata"]["witcert"]
        assert found(fp8_twin, summary["request_id"]) == summary


def test_native_answers_of_several_requests_carry_a_summary_each(fp8_twin: Metered) -> None:
    """Lists, parallel samples, Vertex's predictions; ids that a client chose, with slashes, blanks and signs."""
    prompt = samples_of_each_task(1)[0].prompt
    sampling = {"temperature": 0, "max_new_tokens": 3}
    names = ["team/7?a=b#c", "100% ключ"]
    several = answered(fp8_twin, "/generate", text=[prompt, prompt], rid=names, sampling_params=sampling)
    assert [reply["meta_info"]["witcert"]["request_id"] for reply in several] == names
    several += answered(fp8_twin, "/generate", text=prompt, sampling_params={**sampling, "n": 2})
    vertex = {"instances": [{"text": prompt}, {"text": prompt}], "parameters": {"sampling_params": sampling}}
    several += answered(fp8_twin, "/vertex_generate", **vertex)["predictions"]
    ids = [reply["meta_info"]["id"] for reply in several]
    assert len(set(ids)) == 6
    assert [found(fp8_twin, name) for name in ids] == [reply["meta_info"]["witcert"] for reply in several]


def test_a_scoring_request_is_in_the_records(fp8_twin: Metered) -> None:
    """`/v1/score` gives its requests no names, and room for nothing else."""
    before = len(fp8_twin.records())
    answered(fp8_twin, "/v1/score", query="key", items=[" one", " two"], label_token_ids=[5, 6], model="m")
    ended = [r for r in fp8_twin.records()[before:] if r["schema"].startswith("witcert.request")]
    assert len({record["request_id"] for record in ended}) >= 2


def test_a_client_that_leaves_is_summed_up(fp8_twin: Metered) -> None:
    """In the middle of a stream, or when its patience ends; the message's id is known by then."""
    prompt = samples_of_each_task(1)[0].prompt
    chat = {"messages": [{"role": "user", "content": prompt}], "model": "m", "max_tokens": 900, "ignore_eos": True}
    with fp8_twin.server.client() as client:
        with client.stream("POST", "/v1/messages", json={**chat, "stream": True}) as reply:
            first = next(line for line in reply.iter_lines() if line.startswith("data: {"))
        sampling = {"max_new_tokens": 900, "ignore_eos": True}
        with pytest.raises(httpx.TimeoutException):
            client.post("/generate", json={"text": prompt, "rid": "late", "sampling_params": sampling}, timeout=2)
        for name in (json.loads(first[6:])["message"]["id"], "late"):
            for _ in range(300):
                answer = client.get(f"/witcert/requests/{name}")
                if answer.status_code == 200:
                    break
                time.sleep(0.1)
            assert answer.json()["finish_reason"] == "abort"


def test_who_may_ask(fp8_twin: Metered) -> None:
    """Whoever may ask the server for an answer: the administrator's key opens its own routes only, as in SGLang."""
    summary = fp8_twin.generate(samples_of_each_task(1)[0].prompt)["meta_info"]["witcert"]
    routes = ["/witcert/status", f"/witcert/requests/{summary['request_id']}", "/v1/models"]

    def codes(value: str | None, method: str = "GET", **headers: str) -> list[int]:
        headers |= {} if value is None else {"Authorization": value}
        return [httpx.request(method, fp8_twin.server.url + r, headers=headers).status_code for r in routes]

    for refused in (None, "", KEY, f"Basic {KEY}", "Bearer wrong", f"Bearer {ADMIN_KEY}", f"Bearer {KEY}x"):
        assert codes(refused) == [401, 401, 401], refused
    assert codes(f"Bearer {KEY}") == codes(f"bearer {KEY}") == [200, 200, 200]
    assert codes(None, Host="x/health?") == [401, 401, 401]
    assert codes(None, "HEAD") == [401, 401, 401]
    ours = httpx.request("OPTIONS", fp8_twin.server.url + routes[1])  # as browsers ask beforehand: it says nothing
    assert ours.status_code == 405
    assert "witcert" not in ours.text


def test_odd_ids_get_one_line(fp8_twin: Metered) -> None:
    with fp8_twin.server.client() as client:
        for name, status in (("i" * 60_000, 414), ("%00", 404), ("%ff%fe", 404), ("..%2f..%2fetc", 404), ("", 404)):
            answer = client.get(f"/witcert/requests/{name}")
            assert answer.status_code == status
            assert len(answer.json()["error"]) < 200
            assert "\n" not in answer.json()["error"]


def test_native_stream(fp8_twin: Metered) -> None:
    prompt = samples_of_each_task(1)[0].prompt
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 6}, "stream": True}
    with fp8_twin.server.client() as client, client.stream("POST", "/generate", json=body) as reply:
        chunks = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    assert "witcert" in chunks[-1]["meta_info"]
    assert all("witcert" not in chunk["meta_info"] for chunk in chunks[:-1])


def test_parallel_samples_have_a_summary_each(fp8_twin: Metered) -> None:
    prompt = samples_of_each_task(1)[0].prompt
    with fp8_twin.server.client() as client:
        body = {"model": "m", "prompt": prompt, "max_tokens": 4, "temperature": 1.0, "n": 2}
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
    ids = {summary["request_id"] for summary in answer["metadata"]["witcert"]}
    assert len(ids) == 2


def test_prefix_hit_is_metered(fp8_twin: Metered) -> None:
    """A second question over a cached prompt reads quantized keys while its own chunk is computed."""
    prompt = samples_of_each_task(1, seed=77)[0].prompt
    fp8_twin.generate(prompt)
    again = fp8_twin.generate(prompt)
    assert again["meta_info"]["cached_tokens"] > 400
    assert again["meta_info"]["witcert"]["rows_metered"] > again["meta_info"]["completion_tokens"] - 1


@pytest.mark.parametrize(
    ("asked", "sampling"),
    [
        ({}, {}),
        ({}, {"regex": "key[0-9]{2}"}),
        ({"return_logprob": True}, {}),
        ({"return_logprob": True, "token_ids_logprob": [5, 6]}, {}),
    ],
)
def test_a_request_without_output_is_accounted_for(
    fp8_twin: Metered, asked: dict[str, Any], sampling: dict[str, Any]
) -> None:
    """Scoring reads the cached prefix and samples nothing; its rows must be measured or unknown, never absent."""
    prompt = samples_of_each_task(1, seed=78)[0].prompt
    fp8_twin.generate(prompt)
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 0, **sampling}, **asked}
    with fp8_twin.server.client() as client:
        reply = client.post("/generate", json=body).raise_for_status().json()["meta_info"]
    summary = reply["witcert"]
    assert reply["cached_tokens"] > 400
    assert summary["rows_seen"] == reply["prompt_tokens"] - reply["cached_tokens"]
    assert summary["rows_metered"] > 0


def test_a_beam_search_is_refused(fp8_twin: Metered) -> None:
    """Its other beams are rows of the batch that belong to no request SGLang names: they would be missing."""
    body = {"text": samples_of_each_task(1)[0].prompt, "sampling_params": {"beam_width": 3, "max_new_tokens": 4}}
    with fp8_twin.server.client() as client:
        reply = client.post("/generate", json=body)
    assert reply.status_code == 400
    assert "beam_width" in reply.json()["error"]["message"]


def test_health_probes_are_no_requests(fp8_twin: Metered) -> None:
    with fp8_twin.server.client() as client:
        for _ in range(3):
            assert client.get("/health_generate").status_code == 200
    assert not [r for r in fp8_twin.records() if r["request_id"].startswith("HEALTH_CHECK")]


def test_banner_and_status(fp8_twin: Metered) -> None:
    log = fp8_twin.server.log_text()
    assert "WitCert meters this server: fp8_e4m3_cast" in log
    assert "16 (4 of 4 layers x 4 query heads)" in log
    with fp8_twin.server.client() as client:
        status = client.get("/witcert/status").json()
    assert status["layers_metered"] == [0, 1, 2, 3]
    assert {"witcert", "witcert-sglang", "sglang", "torch"} <= status["versions"].keys()
    assert status["bytes_witness"] > 0


def test_an_evaluation_asks_the_running_server(
    fp8_twin: Metered, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`witcert eval ruler --url`: what is metered is read from the server, lengths from its own tokenizer."""
    command = ["eval", "ruler", "--url", fp8_twin.server.url, "--tasks", "multi_key,multi_query", "--lengths", "128"]
    command += ["--samples", "2", "--no-plot", "--out", str(tmp_path)]
    monkeypatch.delenv("WITCERT_API_KEY", raising=False)
    assert main(command) == 2
    assert "WITCERT_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("WITCERT_API_KEY", KEY)
    assert main(command) == 0
    assert "fp8_e4m3_cast" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert (row["quantizer"], row["mode"], row["engines"]) == ("fp8_e4m3_cast", "raw", ["sglang"])
    assert row["score"]["count"] == 4
    assert row["score"]["value"] < 1.0
    assert row["meter"]["audited"] == row["meter"]["cells_measured"] > 0 == row["meter"]["violations"]
