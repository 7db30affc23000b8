"""A gate that repairs makes a damaged cache's answers right again; without budget it says so, or aborts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import samples_of_each_task
from engine import Answer, running_engine
from witcert_demo.tasks import Sample

pytestmark = pytest.mark.vllm

DAMAGED = {"quantizer": {"name": "fp8_e4m3_cast"}, "meter": {"audit_every": 1}}


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return samples_of_each_task(2, num_tokens=160, seed=51)


def ask(twin: Path, work: Path, samples: list[Sample], **gate: Any) -> list[Answer]:
    """All questions at once, so that decode rows are mixed with chunks of other prompts."""
    with running_engine(twin, work, {**DAMAGED, "gate": gate}, max_num_batched_tokens=128) as engine:
        return engine.ask([sample.prompt for sample in samples])


def test_repairs_make_answers_right(twin: Path, tmp_path: Path, samples: list[Sample]) -> None:
    observed = ask(twin, tmp_path / "observe", samples, kind="observe")
    repaired = ask(twin, tmp_path / "certified", samples, kind="certified")
    expected = [list(sample.answer_ids) for sample in samples]
    assert sum(a.tokens == e for a, e in zip(observed, expected, strict=True)) <= 3
    assert sum(a.tokens == e for a, e in zip(repaired, expected, strict=True)) >= 5
    for answer in repaired:
        gate = answer.summary["gate"]
        assert gate["repaired_blocks"] > 0
        assert gate["within_target"] == answer.summary["cells_measured"]
        assert answer.summary["cells_unknown"] == 0
        assert answer.summary["audit"]["violations"] == answer.summary["audit"]["mismatches"] == 0


def test_an_exhausted_budget_is_said_and_may_abort(twin: Path, tmp_path: Path, samples: list[Sample]) -> None:
    served = ask(twin, tmp_path / "serve", samples[:1], kind="certified", max_pagein_bytes=0)
    aborted = ask(twin, tmp_path / "abort", samples[:1], kind="certified", max_pagein_bytes=0, on_exhausted="abort")
    assert served[0].finish_reason in ("stop", "length")
    assert served[0].summary["gate"]["above_target"] > 0
    assert aborted[0].finish_reason == "abort"
    assert aborted[0].summary["finish_reason"] == "abort"
    assert len(aborted[0].tokens) < len(served[0].tokens)
