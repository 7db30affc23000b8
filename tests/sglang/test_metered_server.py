"""A metered server with a damaging cache: what clients, operators and files are told about it."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import Metered, ask_many, samples_of_each_task

from witcert_core.cli import main

pytestmark = pytest.mark.sglang
LAYERS, HEADS = 4, 4


def schema(name: str) -> dict[str, Any]:
    return json.loads((files("witcert_core") / "report" / "schema" / f"{name}.schema.json").read_text())


@pytest.fixture(scope="module")
def summaries(fp8_twin: Metered) -> list[dict[str, Any]]:
    """Summaries of 24 questions asked four at a time; the accuracy is checked on the way."""
    asked = ask_many(fp8_twin.server, samples_of_each_task(8))
    right = sum(a.right for a in asked)
    assert right < 0.4 * len(asked), f"{right} of {len(asked)} right: this cache should damage answers"
    found = [a.summary for a in asked if a.summary is not None]
    assert len(found) == len(asked)
    return found


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


def test_openai_stream_ends_with_the_summary(fp8_twin: Metered) -> None:
    prompt = samples_of_each_task(1)[0].prompt
    body = {"model": "m", "prompt": prompt, "max_tokens": 6, "temperature": 0, "stream": True}
    with fp8_twin.server.client() as client, client.stream("POST", "/v1/completions", json=body) as reply:
        events = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    with_summary = [chunk for chunk in chunks if "metadata" in chunk]
    assert with_summary == chunks[-1:]
    (summary,) = with_summary[0]["metadata"]["witcert"]
    jsonschema.validate(summary, schema("request"))
    assert summary["rows_metered"] > 0


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
    assert status["bytes_witness"] > 0


def test_an_evaluation_asks_the_running_server(
    fp8_twin: Metered, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`witcert eval ruler --url`: what is metered is read from the server, lengths from its own tokenizer."""
    command = ["eval", "ruler", "--url", fp8_twin.server.url, "--tasks", "multi_key,multi_query", "--lengths", "128"]
    assert main([*command, "--samples", "2", "--no-plot", "--out", str(tmp_path)]) == 0
    assert "fp8_e4m3_cast" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert (row["quantizer"], row["mode"], row["engines"]) == ("fp8_e4m3_cast", "raw", ["sglang"])
    assert row["score"]["count"] == 4
    assert row["score"]["value"] < 1.0
    assert row["meter"]["audited"] == row["meter"]["cells_measured"] > 0 == row["meter"]["violations"]
