"""One policy, one model, the same prompts: SGLang and vLLM give the same tokens, bounds, repairs and report.

Keys on a rounding boundary are settled alike, see `tests/parity/plugin/witcert_parity.py`; how many, and that they are
on one, is tested too.

SGLang runs in its own environment (`SGLANG_PYTHON`, by default the one the Makefile makes).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import prompts
from engine import HEADS, LAYERS, cells_of, running_engine, write_policy

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "tests" / "parity" / "plugin"
SGLANG = Path(os.environ.get("SGLANG_PYTHON", ROOT / ".envs" / "sglang" / "bin" / "python"))
MAX_TOKENS = 6
PROMPT_TOKENS, KV_HEADS, HEAD_DIM = 128, 2, 64

sys.path.insert(0, str(PLUGIN))
import witcert_parity  # noqa: E402  (registers the quantizer in this process)

CAST = "fp8_e4m3_cast"
OBSERVED = {"prefill_reads": "stored", "meter": {"stride": 1, "audit_every": 1, "max_rows": 4}}
REPAIRED = {"prefill_reads": "stored", "gate": {"kind": "combined"}, "meter": {"audit_every": 1}}


def ask_sglang(model: Path, work: Path, policy: dict[str, Any], asked: list[str]) -> list[dict[str, Any]]:
    jsonl = work / "sglang.jsonl"
    written = write_policy(work / "sglang.yaml", report={"jsonl": str(jsonl), "cells": "all"}, **policy)
    case, out = work / "case.json", work / "sglang.json"
    case.write_text(
        json.dumps({"model": str(model), "policy": str(written), "prompts": asked, "max_tokens": MAX_TOKENS})
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    env["PYTHONPATH"] = os.pathsep.join(str(ROOT / part) for part in ("", "adapters/sglang", "demo", PLUGIN))
    command = [str(SGLANG), str(ROOT / "tests" / "parity" / "ask_sglang.py"), str(case), str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[dict[str, Any]] = json.loads(out.read_text())
    for answer in answers:
        answer["cells"] = cells_of(jsonl, answer["summary"]["request_id"])
    return answers


def ask_vllm(model: Path, work: Path, policy: dict[str, Any], asked: list[str], settled: Path) -> list[dict[str, Any]]:
    with running_engine(model, work / "vllm", policy) as engine:
        settled.unlink(missing_ok=True)  # the quantizer was tried at start
        found = [engine.ask([prompt], max_tokens=MAX_TOKENS)[0] for prompt in asked]
        return [
            {"tokens": a.tokens, "summary": a.summary, "cells": cells_of(engine.jsonl, a.summary["request_id"])}
            for a in found
        ]


@dataclass(frozen=True)
class Parity:
    """Answers of both engines to each prompt, and what was settled (`witcert_parity.py`), a line a quantizer call."""

    answers: list[tuple[dict[str, Any], dict[str, Any]]]
    settled: list[dict[str, Any]]


@pytest.fixture(scope="module", params=["observed", "repaired"])
def both(
    request: pytest.FixtureRequest, checkpoint: Path, twin: Path, tmp_path_factory: pytest.TempPathFactory
) -> Parity:
    model, policy = (checkpoint, OBSERVED) if request.param == "observed" else (twin, REPAIRED)
    work = tmp_path_factory.mktemp(request.param)
    records = work / "quantized"
    records.mkdir()
    asked = prompts(seed=41, num_tokens=128)
    recording: dict[str, Any] = {"name": "parity", "params": {"base": CAST, "folder": str(records)}}
    settling = {"name": "parity", "params": {**recording["params"], "settle": True}}
    sglang = ask_sglang(model, work, {**policy, "quantizer": recording}, asked)
    calls = records.with_suffix(".jsonl")
    vllm = ask_vllm(model, work, {**policy, "quantizer": settling}, asked, calls)
    settled = [json.loads(line) for line in calls.read_text().splitlines()]
    return Parity(list(zip(sglang, vllm, strict=True)), settled)


def test_the_same_tokens_bounds_and_repairs(both: Parity) -> None:
    for sglang, vllm in both.answers:
        assert vllm["tokens"] == sglang["tokens"]
        assert vllm["cells"].keys() == sglang["cells"].keys()
        assert len(vllm["cells"]) >= (len(vllm["tokens"]) - 1) * LAYERS * HEADS
        assert max(abs(vllm["cells"][key] - bound) for key, bound in sglang["cells"].items()) <= 1e-4
        assert vllm["summary"]["gate"] == sglang["summary"]["gate"]


def test_only_boundary_cases_were_settled(both: Parity) -> None:
    """Every key and value that vLLM wrote is SGLang's but for the last bits, and few of them lie on a boundary."""
    written = sum(PROMPT_TOKENS + len(vllm["tokens"]) - 1 for _, vllm in both.answers)
    assert sum(call["tokens"] for call in both.settled) == written * LAYERS * 2
    assert max(call["ulps"] for call in both.settled) <= witcert_parity.ULPS
    numbers = written * LAYERS * 2 * KV_HEADS * HEAD_DIM
    assert sum(call["settled"] for call in both.settled) < 1e-3 * numbers


def test_the_same_report(both: Parity) -> None:
    schema = json.loads((files("witcert_core") / "report" / "schema" / "request.schema.json").read_text())
    for sglang, vllm in both.answers:
        for answer, name in ((sglang, "sglang"), (vllm, "vllm")):
            jsonschema.validate(answer["summary"], schema)
            assert answer["summary"]["engine"] == name
        own = {"engine", "request_id", "finish_reason"}
        for key in sglang["summary"].keys() - own:
            assert type(vllm["summary"][key]) is type(sglang["summary"][key]), key
        counts = ("rows_seen", "rows_metered", "cells_measured", "cells_exact", "tokens_read", "unknown_reasons")
        for key in (*counts, "claim", "tier"):
            assert vllm["summary"][key] == sglang["summary"][key], key
