"""Model runner V2 and tensor parallelism give what one V1 worker gives: tokens, bounds and repairs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import prompts
from engine import cells_of, running_engine, write_policy

pytestmark = pytest.mark.vllm

POLICY = {
    "quantizer": {"name": "fp8_e4m3_cast"},
    "prefill_reads": "stored",
    "gate": {"kind": "combined"},
    "meter": {"audit_every": 1},
}
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def asked() -> list[str]:
    return prompts(seed=41, num_tokens=64)[:2]


@pytest.fixture(scope="module")
def expected(twin: Path, asked: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """V1, one worker, in this process."""
    with running_engine(twin, tmp_path_factory.mktemp("v1"), POLICY) as engine:
        found = [engine.ask([prompt], max_tokens=MAX_TOKENS)[0] for prompt in asked]
        return [
            {"tokens": a.tokens, "summary": a.summary, "cells": cells_of(engine.jsonl, a.summary["request_id"])}
            for a in found
        ]


def in_own_process(
    model: Path, work: Path, asked: list[str], v2: bool, options: dict[str, Any], **variables: str
) -> dict[str, Any]:
    jsonl = work / "records.jsonl"
    policy = write_policy(work / "policy.yaml", report={"jsonl": str(jsonl), "cells": "all"}, **POLICY)
    case, out = work / "case.json", work / "out.json"
    content = {"model": str(model), "policy": str(policy), "prompts": asked, "max_tokens": MAX_TOKENS}
    case.write_text(json.dumps({**content, "v2": v2, "options": options}))
    script = Path(__file__).with_name("ask_vllm.py")
    done = subprocess.run(
        [sys.executable, str(script), str(case), str(out)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    for answer in found["answers"]:
        answer["cells"] = cells_of(jsonl, answer["summary"]["request_id"])
    return found


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert ours["cells"].keys() == theirs["cells"].keys()
        assert max(abs(ours["cells"][key] - bound) for key, bound in theirs["cells"].items()) <= 1e-4
        assert ours["summary"]["gate"] == theirs["summary"]["gate"]
        assert ours["summary"]["gate"]["repaired_blocks"] > 0
        assert ours["summary"]["audit"]["violations"] == 0


def test_model_runner_v2(twin: Path, asked: list[str], expected: list[dict[str, Any]], tmp_path: Path) -> None:
    found = in_own_process(twin, tmp_path, asked, v2=True, options={})
    assert found["runner"].startswith("vllm.v1.worker.cpu.model_runner")
    assert_same(found["answers"], expected)


def test_tensor_parallelism(twin: Path, asked: list[str], expected: list[dict[str, Any]], tmp_path: Path) -> None:
    """Two workers, each with its heads; rank 0 reports them all. Compiled, to have both at once."""
    options = {"tensor_parallel_size": 2, "enforce_eager": False}
    found = in_own_process(
        twin, tmp_path, asked, v2=False, options=options, VLLM_CPU_OMP_THREADS_BIND="0|1", VLLM_CPU_CI_ENV="1"
    )
    assert found["runner"] == "vllm.v1.worker.cpu_model_runner False"
    assert found["status"]["num_ranks"] == 2
    assert_same(found["answers"], expected)
