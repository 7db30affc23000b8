"""`witcert canary` beside a running server: figures as of `witcert eval drift`, and it outlives the server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import write_policy
from witcert_demo.servers import Server, free_port, server_command, server_environment
from witcert_demo.tasks import make_samples

from witcert_core.evaluate.askers import UrlAsker
from witcert_core.evaluate.canary import Canary, CanaryRun
from witcert_core.evaluate.drift_served import served_drift
from witcert_core.evaluate.servers import serving

pytestmark = pytest.mark.sglang
SAMPLES = make_samples("multi_query", 256, 4, seed=5)
TOKENS = 12


@contextmanager
def metered(model: Path, work: Path, port: int) -> Iterator[Server]:
    policy = write_policy(work / "policy.yaml", quantizer={"name": "fp8_e4m3_cast"}, meter={"stride": 1})
    options = ["--dtype", "float32", "--chunked-prefill-size", "300", "--log-requests", "--log-requests-level", "3"]
    options += ["--log-requests-format", "json", "--log-requests-target", str(work / "requests")]
    command = server_command(model, port, options)
    with serving(command, port, env=server_environment(policy), log=work / "log") as server:
        yield server


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def answer(server: Server, prompt: str, **options: object) -> list[int]:
    """Token ids: the text lacks special tokens."""
    sampling = {"temperature": 0, "max_new_tokens": TOKENS}
    with server.client() as client:
        found = client.post("/generate", json={"text": prompt, "sampling_params": sampling, **options})
    ids: list[int] = found.raise_for_status().json()["output_ids"]
    return ids


@pytest.mark.slow
def test_a_sidecar_scores_its_share_through_a_restart(twin: Path, tmp_path: Path) -> None:
    traffic, out, log = tmp_path / "traffic.jsonl", tmp_path / "drift.jsonl", tmp_path / "canary.log"
    traffic.touch()
    port, own_port = free_port(), free_port()
    program = "import sys; from witcert_core.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "canary", "--url", f"http://127.0.0.1:{port}"]
    command += ["--traffic", str(traffic), "--out", str(out), "--share", "0.5", "--port", str(own_port)]
    command += ["--tokens", str(TOKENS), "--per-minute", "100000"]

    def scraped() -> str:
        return httpx.get(f"http://127.0.0.1:{own_port}/metrics").raise_for_status().text

    def add(*lines: dict[str, Any] | str) -> None:
        with traffic.open("a") as file:
            file.writelines(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)

    prompts = [sample.prompt for sample in SAMPLES]
    with log.open("wb") as sink:
        canary = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
    try:
        until(lambda: "is a server running there?" in log.read_text())  # it may start before its server
        with metered(twin, tmp_path, port) as server:
            until(lambda: "witcert_canary_server_up 1.0" in scraped())
            served = [again(server, prompt) for prompt in prompts]
            assert not records(out)  # nothing of what is not in the traffic
            for i in range(4):
                add({"prompt": prompts[i // 2], "text": served[i // 2], "id": f"r{i // 2}"})
            add("{broken", {"text": "no prompt"}, {"prompt": prompts[2], "text": "c1", "id": "once"})
            until(lambda: len(records(out)) == 2)
            asked, rows = UrlAsker(server.url), list[dict[str, Any]]()
            for i, record in enumerate(records(out)):
                ids, tokens = list(SAMPLES[i].prompt_ids), record["drift"]["tokens"]
                found = served_drift(asked, [ids], tokens, {}, {"resamples": 10, "seed": 0})
                rows += found["quantizers"]["fp8_e4m3_cast"]["samples"]
            asked.close()
        for i, (row, record) in enumerate(zip(rows, records(out), strict=True)):
            assert (record["schema"], record["request_id"]) == ("witcert.canary/1", f"r{i}")
            assert record["quantizer"] == "fp8_e4m3_cast"
            for name in ("tokens", "first_change"):
                assert record["drift"][name] == row[name]
            assert record["drift"]["kl"] == pytest.approx(row["kl"], rel=1e-3)
            assert record["meter"]["worst"] == pytest.approx(row["meter"]["worst"])
            assert record["served"]["same"]
            assert record["served"]["nll"] == pytest.approx(record["drift"]["exact_nll"], rel=1e-3)
        assert not {"prompt", "text"} & {key for record in records(out) for key in record}
        assert all(word not in out.read_text() for word in prompts[:2])
        add({"prompt": prompts[3], "text": served[0][:6], "id": "late"})
        until(lambda: "witcert_canary_server_up 0.0" in scraped())
        with metered(twin, tmp_path, port):
            until(lambda: len(records(out)) == 3)
        page = scraped()
    finally:
        canary.send_signal(signal.SIGTERM)
        code = canary.wait(30)
    said = log.read_text()
    assert code == 143, said
    assert "Traceback" not in said
    assert said.count("answers; quantizer fp8_e4m3_cast") == 2
    assert 'witcert_canary_lines_malformed_total{reason="not_json"} 1.0' in page
    assert 'witcert_canary_lines_malformed_total{reason="no_prompt"} 1.0' in page
    assert "witcert_canary_requests_seen_total 6.0" in page
    assert "witcert_canary_requests_taken_total 3.0" in page
    assert 'witcert_canary_kl_nats_count{quantizer="fp8_e4m3_cast"} 3.0' in page
    last = records(out)[-1]
    if last["request_id"] == "late":  # drawn of the last two: another answer than the greedy one
        assert not last["served"]["same"]
        assert last["served"]["nll"] > last["drift"]["exact_nll"]
    with pytest.raises(httpx.ConnectError):
        scraped()


def test_the_servers_own_log_is_traffic_without_the_canarys_requests(twin: Path, tmp_path: Path) -> None:
    with metered(twin, tmp_path, free_port()) as server:
        until(lambda: list((tmp_path / "requests").glob("*.log")))
        (log,) = (tmp_path / "requests").glob("*.log")
        for sample in SAMPLES[:2]:
            answer(server, sample.prompt)
        answer(server, SAMPLES[2].prompt, extra_key="a tenant")
        run = CanaryRun(server.url, log, tmp_path / "out", 1.0, "127.0.0.1", 1, None, False, TOKENS, 1000, 1e6)
        said: list[str] = []
        canary = Canary(run, said.append)
        served = [answer(server, sample.prompt, rid=f"r{i}") for i, sample in enumerate(SAMPLES[:2])]
        answer(server, SAMPLES[2].prompt, rid="apart", extra_key="a tenant")
        deadline = time.monotonic() + 60
        while len(records(tmp_path / "out")) < 3 and time.monotonic() < deadline:
            canary.turn()
        for _ in range(3):
            time.sleep(0.3)
            canary.turn()
        canary.close()
        cached = [answer_cached(server, SAMPLES[2].prompt, key) for key in ("a tenant", None)]
    found = records(tmp_path / "out")
    assert [record["request_id"] for record in found] == ["r0", "r1", "apart"], said
    assert all(record["served"]["same"] and record["served"]["tokens"] > 1 for record in found)
    assert [record["drift"]["tokens"] for record in found[:2]] == [len(ids) for ids in served]
    assert canary.metrics.registry.get_sample_value("witcert_canary_requests_seen_total") == 3
    assert cached[0] > 200 > cached[1]  # asked again under its own key, nothing of it is left in everybody's cache


def again(server: Server, prompt: str) -> list[int]:
    """From a cached prefix, as the canary finds it: the end of the prompt reads the quantized cache then."""
    answer(server, prompt)
    return answer(server, prompt)


def answer_cached(server: Server, prompt: str, key: str | None) -> int:
    """Tokens of a prompt that were found in the cache."""
    body = {"text": prompt, "sampling_params": {"max_new_tokens": 1}, "extra_key": key}
    with server.client() as client:
        return int(client.post("/generate", json=body).raise_for_status().json()["meta_info"]["cached_tokens"])
