"""A repairing gate in a running server: damaged answers come right, and what cannot be repaired is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Metered, ask_many, check_recorded, samples_of_each_task, write_policy
from witcert_demo.servers import running_server

pytestmark = pytest.mark.sglang
SHORT = ["--dtype", "float32", "--disable-radix-cache"]


@pytest.fixture(scope="module")
def gated_twin(twin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metered]:
    work = tmp_path_factory.mktemp("gated")
    jsonl = work / "records.jsonl"
    policy = write_policy(
        work / "policy.yaml",
        quantizer={"name": "fp8_e4m3_cast"},
        meter={"audit_every": 1},
        gate={"kind": "combined"},
        report={"jsonl": str(jsonl), "cells": "all"},
    )
    with running_server(twin, policy=policy, log=work / "log", options=SHORT) as server:
        yield Metered(server, jsonl)


def test_recorded(gated_twin: Metered) -> None:
    check_recorded("fp8_e4m3_cast, repaired", gated_twin)


def test_damaged_answers_come_right(gated_twin: Metered) -> None:
    asked = ask_many(gated_twin.server, samples_of_each_task(3, num_tokens=256))
    assert all(a.right for a in asked)
    summaries = [a.summary for a in asked if a.summary is not None]
    assert len(summaries) == len(asked)
    assert sum(s["audit"]["violations"] + s["audit"]["mismatches"] for s in summaries) == 0
    for summary in summaries:
        gate = summary["gate"]
        assert gate["kind"] == "combined"
        assert gate["repaired_blocks"] > 0
        assert gate["bytes"] <= 4 * 2 * 2 * 64 * 4 * (256 + 16)  # layers, KV heads, K and V, channels, fp32, tokens
        assert gate["within_target"] + gate["ranked"] + gate["above_target"] == summary["cells_measured"]
        assert summary["cells_unknown"] == 0


def test_a_request_that_cannot_be_repaired_is_aborted(twin: Path, tmp_path: Path) -> None:
    policy = write_policy(
        tmp_path / "policy.yaml",
        quantizer={"name": "fp8_e4m3_cast"},
        gate={"kind": "certified", "max_pagein_bytes": 100_000, "on_exhausted": "abort"},
    )
    with running_server(twin, policy=policy, log=tmp_path / "log", options=SHORT) as server:
        reply = Metered(server, tmp_path / "none").generate(samples_of_each_task(1, num_tokens=256)[0].prompt)
    reason = reply["meta_info"]["finish_reason"]
    assert reason["type"] == "abort"
    assert "budget" in reason["message"]
    assert reply["meta_info"]["witcert"]["gate"]["above_target"] > 0
    assert reply["meta_info"]["witcert"]["gate"]["bytes"] <= 100_000
