"""What the scheduler does to a request leaves its tokens and its bounds alone: two servers, one of them under stress.

`busy` has the overlap scheduler, pages of 16, small mixed chunks, a pool that holds a few prompts, forced retractions
and a LoRA adapter. `quiet` has none of that. Quantizer and prompt reads are deterministic, so both must report alike.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lora
import pytest
import torch
from conftest import Metered, samples_of_each_task, write_policy
from witcert_demo.servers import running_server

pytestmark = pytest.mark.sglang

LAYERS, HEADS, MAX_ROWS = 4, 4, 2
POOL = 2048
Cells = dict[tuple[int, int, int], float]


@pytest.fixture(scope="module")
def server_of(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    def start(options: list[str], environment: dict[str, str] | None = None) -> Iterator[Metered]:
        work = tmp_path_factory.mktemp("lifecycle")
        jsonl = work / "records.jsonl"
        policy = write_policy(
            work / "policy.yaml",
            quantizer={"name": "int8_token_group"},
            prefill_reads="stored",
            meter={"stride": 1, "audit_every": 1, "max_rows": MAX_ROWS},
            report={"jsonl": str(jsonl), "cells": "all"},
        )
        options = ["--dtype", "float32", "--sleep-on-idle", *options]  # two servers share two cores
        with running_server(
            checkpoint, policy=policy, log=work / "log", options=options, environment=environment
        ) as server:
            yield Metered(server, jsonl)

    return start


@pytest.fixture(scope="module")
def busy(
    checkpoint: Path, server_of: Callable[..., Iterator[Metered]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Metered]:
    work = tmp_path_factory.mktemp("busy")
    adapter = lora.write_adapter(checkpoint, work / "adapter")
    options = ["--page-size", "16", "--max-total-tokens", str(POOL), "--chunked-prefill-size", "112"]
    options += ["--enable-mixed-chunk", "--enable-lora", "--lora-paths", f"tiny={adapter}"]
    options += ["--lora-backend", "torch_native", "--max-loras-per-batch", "2"]
    retract = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "2"}
    yield from server_of(options, {**retract, **lora.without_pinned_memory(work)})


@pytest.fixture(scope="module")
def quiet(server_of: Callable[..., Iterator[Metered]]) -> Iterator[Metered]:
    yield from server_of(["--page-size", "1", "--disable-overlap-schedule"])


@pytest.fixture(params=["busy", "quiet"])
def either(request: pytest.FixtureRequest) -> Metered:
    metered: Metered = request.getfixturevalue(request.param)
    return metered


def prompts(seed: int, num_tokens: int = 256) -> list[str]:
    return [sample.prompt for sample in samples_of_each_task(1, num_tokens, seed)]


def measured(server: Metered, reply: dict[str, Any]) -> Cells:
    """Bound of every measured cell of a request by position, layer and head; its audit holds."""
    audit = reply["meta_info"]["witcert"]["audit"]
    assert audit["violations"] == audit["mismatches"] == 0
    wanted = reply["meta_info"]["id"]
    records = [r for r in server.records() if r["request_id"] == wanted and r.get("status") in ("measured", "exact")]
    return {(r["position"], r["layer"], r["q_head"]): r["meter"] for r in records}


def assert_same_meter(ours: Cells, theirs: Cells, rows: int, tolerance: float = 1e-3) -> None:
    """The cells both measured, of at least `rows` query rows, have the same bounds."""
    common = sorted(ours.keys() & theirs.keys())
    assert len(common) >= rows * LAYERS * HEADS
    assert max(ours[key] for key in common) > 10 * tolerance
    assert [ours[key] for key in common] == pytest.approx([theirs[key] for key in common], abs=tolerance)


def test_overlap_chunks_and_page_size_change_nothing(busy: Metered, quiet: Metered) -> None:
    for prompt in prompts(seed=31):
        one, other = busy.generate(prompt), quiet.generate(prompt)
        assert one["output_ids"] == other["output_ids"]
        assert_same_meter(measured(busy, one), measured(quiet, other), rows=len(one["output_ids"]))
    for server, overlap in ((busy, True), (quiet, False)):
        with server.server.client() as client:
            assert client.get("/server_info").json()["disable_overlap_schedule"] is not overlap


def test_a_cached_prefix_changes_nothing(either: Metered) -> None:
    prompt = prompts(seed=32)[1]
    cold, warm = either.generate(prompt), either.generate(prompt)
    assert cold["meta_info"]["cached_tokens"] < 16
    assert warm["meta_info"]["cached_tokens"] >= 240
    assert warm["output_ids"] == cold["output_ids"]
    assert_same_meter(measured(either, cold), measured(either, warm), rows=len(warm["output_ids"]))


def test_retraction_changes_nothing(busy: Metered, quiet: Metered) -> None:
    asked = [prompt for seed in (33, 34) for prompt in prompts(seed, num_tokens=128)]
    with ThreadPoolExecutor(len(asked)) as pool:
        retracted = list(pool.map(busy.generate, asked))
    assert any(reply["meta_info"]["num_retractions"] for reply in retracted)
    for prompt, reply in zip(asked, retracted, strict=True):
        alone = quiet.generate(prompt)
        assert alone["meta_info"]["num_retractions"] == 0
        assert reply["output_ids"] == alone["output_ids"]
        assert_same_meter(measured(busy, reply), measured(quiet, alone), rows=len(alone["output_ids"]) - 1)
        meta = reply["meta_info"]
        once = meta["prompt_tokens"] - meta["cached_tokens"] + meta["completion_tokens"] - 1
        # What is computed again is metered again; a request retracted before it decoded has nothing of the kind.
        again = meta["witcert"]["rows_seen"] - once
        assert again >= 0 if meta["num_retractions"] else again == 0


def test_a_slot_used_again_says_what_a_fresh_one_says(busy: Metered) -> None:
    """Other prompts are written over the whole pool; the evicted prompt then gets other slots, used before."""
    prompt = prompts(seed=35)[0]
    fresh = busy.generate(prompt)
    for seed in range(100, 100 + 2 * POOL // (3 * 256) + 1):
        for other in prompts(seed):
            busy.generate(other, max_new_tokens=1)
    again = busy.generate(prompt)
    assert again["meta_info"]["cached_tokens"] < 16
    assert again["output_ids"] == fresh["output_ids"]
    assert_same_meter(measured(busy, fresh), measured(busy, again), rows=len(fresh["output_ids"]))


def test_a_constrained_answer_is_metered_row_by_row(either: Metered) -> None:
    """With a grammar the overlap scheduler samples a step only after the next has begun."""
    pattern = "key[0-9]{2}77([0-9]{2}){3}"
    asked = prompts(seed=36)
    free = [either.generate(prompt) for prompt in asked]
    with ThreadPoolExecutor(6) as pool:
        bound = [pool.submit(either.generate, prompt, regex=pattern, max_new_tokens=12) for prompt in asked]
        others = [pool.submit(either.generate, prompt) for prompt in asked]
    for future, before in zip(others, free, strict=True):
        assert future.result()["output_ids"] == before["output_ids"]
    for future in bound:
        reply = future.result()
        assert re.fullmatch(pattern, reply["text"].replace(" ", ""))
        positions = {position for position, _, _ in measured(either, reply)}
        generated = reply["meta_info"]["completion_tokens"]
        assert {p for p in positions if p >= 256} == set(range(256, 256 + generated - 1))
        assert reply["meta_info"]["witcert"]["rows_metered"] >= generated - 1 + 1


def test_grammar_gives_the_same_cells_with_and_without_overlap(busy: Metered, quiet: Metered) -> None:
    prompt = prompts(seed=37)[0]
    options = {"regex": "key[0-9]{2}77([0-9]{2}){3}", "max_new_tokens": 12}
    one, other = busy.generate(prompt, **options), quiet.generate(prompt, **options)
    assert one["output_ids"] == other["output_ids"]
    assert_same_meter(measured(busy, one), measured(quiet, other), rows=len(one["output_ids"]))


def stream_until(server: Metered, request_id: str, chunks: int) -> Iterator[None]:
    """Start an endless request, yield after some chunks, close the connection when resumed."""
    sampling = {"temperature": 0, "max_new_tokens": 900, "ignore_eos": True}
    body = {"text": prompts(seed=38)[0], "rid": request_id, "stream": True, "sampling_params": sampling}
    with server.server.client() as client, client.stream("POST", "/generate", json=body) as reply:
        lines = (line for line in reply.iter_lines() if line.startswith("data: {"))
        for _ in range(chunks):
            next(lines)
        yield


def wait_for_summary(server: Metered, request_id: str) -> dict[str, Any]:
    for _ in range(100):
        for record in server.records():
            if record["request_id"] == request_id and record["schema"].startswith("witcert.request"):
                return record
        time.sleep(0.1)
    raise AssertionError(f"no summary of {request_id} within ten seconds")


@pytest.mark.parametrize("how", ["asked", "connection lost"])
def test_an_aborted_request_is_reported_and_leaves_nothing_behind(either: Metered, how: str) -> None:
    prompt = prompts(seed=39)[2]
    before = either.generate(prompt)
    request_id = f"aborted-{how.replace(' ', '-')}"
    stream = stream_until(either, request_id, chunks=5)
    next(stream)
    if how == "asked":
        with either.server.client() as client:
            client.post("/abort_request", json={"rid": request_id}).raise_for_status()
    for _ in stream:
        pass
    summary = wait_for_summary(either, request_id)
    assert summary["finish_reason"] == "abort"
    assert 4 <= summary["rows_metered"] < 900
    assert summary["audit"]["violations"] == summary["audit"]["mismatches"] == 0
    after = either.generate(prompt)
    assert after["output_ids"] == before["output_ids"]
    assert_same_meter(measured(either, before), measured(either, after), rows=len(after["output_ids"]))


def test_an_abort_between_two_chunks_is_reported_and_forgotten(busy: Metered) -> None:
    """Such a request ends outside the output stream; a later one of the same id begins with nothing."""
    request_id, ids = "aborted-between-chunks", [i for s in samples_of_each_task(1, 512, seed=42) for i in s.prompt_ids]
    body = {"input_ids": ids, "rid": request_id, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    with busy.server.client() as client, ThreadPoolExecutor(1) as pool:
        reply = pool.submit(client.post, "/generate", json=body)
        for _ in range(400):
            if any(record["request_id"] == request_id for record in busy.records()):
                break
            time.sleep(0.01)
        client.post("/abort_request", json={"rid": request_id}).raise_for_status()
        assert reply.result().json()["meta_info"]["completion_tokens"] == 0
        summary = wait_for_summary(busy, request_id)
        assert summary["finish_reason"] == "abort"
        assert 0 < summary["rows_seen"] < len(ids)
        again = client.post("/generate", json={**body, "input_ids": ids[:20]}).raise_for_status().json()["meta_info"]
    assert again["witcert"]["rows_seen"] == 20 - again["cached_tokens"] + again["completion_tokens"] - 1


def test_a_session_goes_on_over_quantized_keys(quiet: Metered) -> None:
    """The second turn reads the first one's cache and is metered as the same text asked at once."""
    first, second = samples_of_each_task(2, 128, seed=40)[:2]
    with quiet.server.client() as client:
        session = client.post("/open_session", json={"capacity_of_str_len": 10_000}).raise_for_status().json()

        def turn(ids: tuple[int, ...], previous: str | None) -> dict[str, Any]:
            at = {"id": session, "rid": previous, "offset": 0, "replace": False}
            sampling = {"temperature": 0, "max_new_tokens": 8}
            body = {"input_ids": list(ids), "sampling_params": sampling, "session_params": at}
            return dict(client.post("/generate", json=body).raise_for_status().json())

        one = turn(first.prompt_ids, None)
        two = turn(second.prompt_ids, one["meta_info"]["id"])
        whole = [*first.prompt_ids, *one["output_ids"], *second.prompt_ids[1:]]  # a turn's <bos> is dropped
        assert two["meta_info"]["prompt_tokens"] == len(whole)
        assert two["meta_info"]["cached_tokens"] >= 128
        client.post("/close_session", json={"session_id": session}).raise_for_status()
        client.post("/flush_cache").raise_for_status()
        sampling = {"temperature": 0, "max_new_tokens": 8}
        once = client.post("/generate", json={"input_ids": whole, "sampling_params": sampling}).json()
    assert once["meta_info"]["cached_tokens"] == 0
    assert two["output_ids"] == once["output_ids"]
    assert_same_meter(measured(quiet, two), measured(quiet, once), rows=len(once["output_ids"]))


def test_a_lora_adapter_is_left_alone(busy: Metered, checkpoint: Path) -> None:
    """Asked with the adapter the server says what the merged model says; asked without, what it said before."""
    prompt = samples_of_each_task(1, 64, seed=41)[0]
    plain = busy.generate(prompt.prompt)
    with busy.server.client() as client:
        sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        body = {"text": prompt.prompt, "lora_path": "tiny", "sampling_params": sampling}
        adapted = client.post("/generate", json=body).raise_for_status().json()
    model, ids = lora.merged_model(checkpoint), list(prompt.prompt_ids)
    for _ in range(4):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert adapted["output_ids"] == ids[-4:]
    assert adapted["output_ids"] != plain["output_ids"][:4]
    assert adapted["meta_info"]["cached_tokens"] == 0  # another adapter's keys are no prefix of ours
    assert adapted["meta_info"]["witcert"]["audit"]["cells"] > 0
    measured(busy, adapted)
    assert busy.generate(prompt.prompt)["output_ids"] == plain["output_ids"]
