"""One policy, one model, the same prompts: SGLang and vLLM give the same tokens, bounds, repairs and report.

SGLang runs in its own environment (`SGLANG_PYTHON`, by default the one the Makefile makes).
"""

from __future__ import annotations

import json
import os
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import prompts
from engine import HEADS, LAYERS, cells_of, running_engine, write_policy

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
SGLANG = Path(os.environ.get("SGLANG_PYTHON", ROOT / ".envs" / "sglang" / "bin" / "python"))
MAX_TOKENS = 6

OBSERVED = {
    "quantizer": {"name": "fp8_e4m3_cast"},
    "prefill_reads": "stored",
    "meter": {"stride": 1, "audit_every": 1, "max_rows": 4},
}
REPAIRED = {
    "quantizer": {"name": "fp8_e4m3_cast"},
    "prefill_reads": "stored",
    "gate": {"kind": "combined"},
    "meter": {"audit_every": 1},
}


def ask_sglang(model: Path, work: Path, policy: dict[str, Any], asked: list[str]) -> list[dict[str, Any]]:
    jsonl = work / "sglang.jsonl"
    written = write_policy(work / "sglang.yaml", report={"jsonl": str(jsonl), "cells": "all"}, **policy)
    case, out = work / "case.json", work / "sglang.json"
    case.write_text(
        json.dumps({"model": str(model), "policy": str(written), "prompts": asked, "max_tokens": MAX_TOKENS})
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    env["PYTHONPATH"] = os.pathsep.join(str(ROOT / part) for part in ("", "adapters/sglang", "demo"))
    command = [str(SGLANG), str(ROOT / "tests" / "parity" / "ask_sglang.py"), str(case), str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[dict[str, Any]] = json.loads(out.read_text())
    for answer in answers:
        answer["cells"] = cells_of(jsonl, answer["summary"]["request_id"])
    return answers


def ask_vllm(model: Path, work: Path, policy: dict[str, Any], asked: list[str]) -> list[dict[str, Any]]:
    with running_engine(model, work / "vllm", policy) as engine:
        found = [engine.ask([prompt], max_tokens=MAX_TOKENS)[0] for prompt in asked]
        return [
            {"tokens": a.tokens, "summary": a.summary, "cells": cells_of(engine.jsonl, a.summary["request_id"])}
            for a in found
        ]


@pytest.fixture(scope="module", params=["observed", "repaired"])
def both(
    request: pytest.FixtureRequest, checkpoint: Path, twin: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(SGLang's answer, vLLM's answer) for each prompt."""
    model, policy = (checkpoint, OBSERVED) if request.param == "observed" else (twin, REPAIRED)
    work = tmp_path_factory.mktemp(request.param)
    asked = prompts(seed=41, num_tokens=128)
    pairs = zip(ask_sglang(model, work, policy, asked), ask_vllm(model, work, policy, asked), strict=True)
    return list(pairs)


def test_the_same_tokens_bounds_and_repairs(both: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for sglang, vllm in both:
        assert vllm["tokens"] == sglang["tokens"]
        assert vllm["cells"].keys() == sglang["cells"].keys()
        assert len(vllm["cells"]) >= (len(vllm["tokens"]) - 1) * LAYERS * HEADS
        # The engines' float32 kernels round differently, and where a key lies between two codes that decides which
        # it gets: then the key itself differs, and cells that look at it a little more than the rest.
        apart = sorted(abs(vllm["cells"][key] - bound) for key, bound in sglang["cells"].items())
        assert apart[len(apart) * 95 // 100] <= 1e-4
        assert apart[-1] <= 1e-2
        assert vllm["summary"]["gate"] == sglang["summary"]["gate"]


def test_the_same_report(both: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    schema = json.loads((files("witcert_core") / "report" / "schema" / "request.schema.json").read_text())
    for sglang, vllm in both:
        for answer, name in ((sglang, "sglang"), (vllm, "vllm")):
            jsonschema.validate(answer["summary"], schema)
            assert answer["summary"]["engine"] == name
        own = {"engine", "request_id", "finish_reason"}
        for key in sglang["summary"].keys() - own:
            assert type(vllm["summary"][key]) is type(sglang["summary"][key]), key
        for key in ("rows_seen", "rows_metered", "cells_measured", "unknown_reasons", "claim", "tier"):
            assert vllm["summary"][key] == sglang["summary"][key], key
