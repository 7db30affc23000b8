"""A vLLM engine inside this process, one at a time, each with its own policy."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import witcert_vllm
import yaml
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.triton_utils import dispatcher
from vllm.v1.attention import selector

LAYERS, HEADS = 4, 4
Cells = dict[tuple[int, int, int], float]


@dataclass(frozen=True)
class Answer:
    """One choice: its tokens, why it ended, its request's summary, and how much of its prompt was cached."""

    tokens: list[int]
    finish_reason: str
    summary: dict[str, Any]
    cached: int


@dataclass
class Engine:
    """A running engine and where its JSON lines go."""

    llm: LLM
    jsonl: Path

    def ask(self, prompts: Sequence[Any], **sampling: Any) -> list[Answer]:
        """Greedy answers, all prompts in one go; `sampling` as for SamplingParams, or a list of them."""
        params = SamplingParams(**{"temperature": 0, "max_tokens": 8, **sampling})
        answers = []
        for output in self.llm.generate(list(prompts), params, use_tqdm=False):
            summaries = output.kv_transfer_params["witcert"]
            for choice, summary in zip(output.outputs, summaries, strict=True):
                cached = output.num_cached_tokens or 0
                answers.append(Answer(list(choice.token_ids), str(choice.finish_reason), summary, cached))
        return answers

    def records(self) -> list[dict[str, Any]]:
        return read_records(self.jsonl)

    def cells(self, answer: Answer) -> Cells:
        """Bound of every measured cell of a request by position, layer and head; its audit holds."""
        assert answer.summary["audit"]["violations"] == answer.summary["audit"]["mismatches"] == 0
        return cells_of(self.jsonl, answer.summary["request_id"])


def read_records(jsonl: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in jsonl.read_text().splitlines()]


def cells_of(jsonl: Path, request_id: str) -> Cells:
    """Bound of every cell of a request that was looked at, exact ones too, by position, layer and head."""
    looked_at = ("measured", "exact")
    mine = [r for r in read_records(jsonl) if r["request_id"] == request_id and r.get("status") in looked_at]
    return {(r["position"], r["layer"], r["q_head"]): r["meter"] for r in mine}


def write_policy(path: Path, **sections: Any) -> Path:
    path.write_text(yaml.safe_dump({"version": 1, **sections}))
    return path


def own_attributes(value: object) -> dict[str, Any]:
    """`vars`, for a walk of vLLM's over all that is imported: llvmlite's library, there after an engine with n-gram
    drafts, answers any name with a function, `__dict__` too."""
    found = vars(value)
    return found if isinstance(found, dict) else {}


@contextmanager
def running_engine(model: Path, work: Path, policy: dict[str, Any], **options: Any) -> Iterator[Engine]:
    """An engine for the length of the block. policy: its sections; every cell goes to the JSON lines."""
    work.mkdir(parents=True, exist_ok=True)
    jsonl = work / "records.jsonl"
    report = {"jsonl": str(jsonl), "cells": "all"}
    os.environ["WITCERT_POLICY"] = str(write_policy(work / "policy.yaml", **{"report": report, **policy}))
    witcert_vllm.load()
    selector._cached_get_attn_backend.cache_clear()  # the backend depends on the policy
    fixed = {"dtype": "float32", "max_model_len": 1024, "gpu_memory_utilization": 0.3, "enforce_eager": True}
    with patch.object(dispatcher, "vars", own_attributes, create=True):
        llm = LLM(model=str(model), **{**fixed, "kv_cache_memory_bytes": 16 << 20, **options})
    try:
        yield Engine(llm, jsonl)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()
        del os.environ["WITCERT_POLICY"]


def in_own_process(
    model: Path,
    work: Path,
    policy: dict[str, Any],
    asked: Sequence[str],
    *,
    v2: bool = False,
    triton: bool = False,
    options: dict[str, Any] | None = None,
    **variables: str,
) -> dict[str, Any]:
    """What `ask_vllm.py` finds: answers with their cells, the model runner, the status, and how far outputs are apart.

    options: of the engine. variables: of its environment.
    """
    work.mkdir(parents=True, exist_ok=True)
    jsonl = work / "records.jsonl"
    written = write_policy(work / "policy.yaml", report={"jsonl": str(jsonl), "cells": "all"}, **policy)
    case, out = work / "case.json", work / "out.json"
    content = {"model": str(model), "policy": str(written), "prompts": list(asked), "max_tokens": 8}
    case.write_text(json.dumps({**content, "v2": v2, "triton": triton, "options": options or {}}))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ask_vllm.py")), str(case), str(out)],
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
