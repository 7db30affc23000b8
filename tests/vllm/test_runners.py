"""Model runner V2 and tensor parallelism give what one V1 worker gives: tokens, bounds and repairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import prompts
from engine import cells_of, in_own_process, running_engine

pytestmark = pytest.mark.vllm

POLICY = {
    "quantizer": {"name": "fp8_e4m3_cast"},
    "prefill_reads": "stored",
    "gate": {"kind": "combined"},
    "meter": {"audit_every": 1},
}


@pytest.fixture(scope="module")
def asked() -> list[str]:
    return prompts(seed=41, num_tokens=64)[:2]


@pytest.fixture(scope="module")
def expected(twin: Path, asked: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """V1, one worker, in this process."""
    with running_engine(twin, tmp_path_factory.mktemp("v1"), POLICY) as engine:
        found = [engine.ask([prompt])[0] for prompt in asked]
        return [
            {"tokens": a.tokens, "summary": a.summary, "cells": cells_of(engine.jsonl, a.summary["request_id"])}
            for a in found
        ]


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert ours["cells"].keys() == theirs["cells"].keys()
        assert max(abs(ours["cells"][key] - bound) for key, bound in theirs["cells"].items()) <= 1e-4
        assert ours["summary"]["gate"] == theirs["summary"]["gate"]
        assert ours["summary"]["gate"]["repaired_blocks"] > 0
        assert ours["summary"]["audit"]["violations"] == ours["summary"]["audit"]["mismatches"] == 0


def test_model_runner_v2(twin: Path, asked: list[str], expected: list[dict[str, Any]], tmp_path: Path) -> None:
    found = in_own_process(twin, tmp_path, POLICY, asked, v2=True)
    assert found["runner"].startswith("vllm.v1.worker.cpu.model_runner")
    assert_same(found["answers"], expected)


def test_tensor_parallelism(twin: Path, asked: list[str], expected: list[dict[str, Any]], tmp_path: Path) -> None:
    """Two workers, each with its heads; rank 0 reports them all. Compiled, to have both at once."""
    options = {"tensor_parallel_size": 2, "enforce_eager": False}
    found = in_own_process(
        twin, tmp_path, POLICY, asked, options=options, VLLM_CPU_OMP_THREADS_BIND="0|1", VLLM_CPU_CI_ENV="1"
    )
    assert found["runner"] == "vllm.v1.worker.cpu_model_runner False"
    assert found["status"]["num_ranks"] == 2
    assert_same(found["answers"], expected)
