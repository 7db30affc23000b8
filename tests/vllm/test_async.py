"""Asynchronous scheduling, on everywhere but on a CPU: a pass is planned before the last one is back.

vLLM's own scheduler and runner overlap their passes here; only streams and events, which a CPU has none of, do nothing.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from conftest import prompts
from engine import HEADS, LAYERS, Engine, running_engine
from vllm import SamplingParams
from vllm.platforms.cpu import CpuPlatform
from witcert_vllm.scheduler import MeteredAsyncScheduler

pytestmark = pytest.mark.vllm

POLICY = {"quantizer": {"name": "int8_token_group"}, "meter": {"stride": 1, "audit_every": 1, "max_rows": 2}}


class Idle(MagicMock):
    """A stream or event; a class, since torch.compile asks of objects whether they are one."""


@pytest.fixture(params=[0, 3], ids=["plain", "drafts"])
def overlapping(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    """Also with drafts, of which the scheduler does not know yet how many were right when it plans the next pass."""
    stock = CpuPlatform.check_and_update_config

    def asynchronously(vllm_config: Any) -> None:
        stock(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    importlib.import_module("vllm.v1.worker.cpu.shm")  # has stand-ins of its own, for good: they must outlive ours
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(asynchronously))
    for owner, name in ((torch, "Event"), (torch.cuda, "Event"), (torch.cuda, "Stream")):
        monkeypatch.setattr(owner, name, Idle)
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    options: dict[str, Any] = {
        "max_model_len": 512,
        "block_size": 32,
        "num_gpu_blocks_override": 20,
        "max_num_batched_tokens": 64,
    }
    if request.param:
        drafts = {"method": "draft_model", "model": str(checkpoint), "num_speculative_tokens": request.param}
        options["speculative_config"] = drafts
    with running_engine(checkpoint, tmp_path, POLICY, max_num_seqs=8, **options) as engine:
        yield engine


def test_rows_computed_ahead_are_not_counted(overlapping: Engine) -> None:
    """Neither those past a request's end, nor those dropped when the prefix cache is reset under load."""
    engine = overlapping.llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    assert isinstance(scheduler, MeteredAsyncScheduler)
    for answer in overlapping.ask(prompts(seed=71, num_tokens=96)):  # they fit, and end where the model ends them
        assert answer.finish_reason == "stop"
        assert answer.summary["unknown_reasons"].keys() <= {"max_rows"}
        decode = {position for position, _layer, _head in overlapping.cells(answer) if position >= 96}
        assert decode == set(range(96, 96 + len(answer.tokens) - 1))
    for number, prompt in enumerate(prompts(seed=72, count=2, num_tokens=128)):
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        engine.add_request(str(number), prompt, params)
    steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
        if steps in (12, 20):
            assert engine.reset_prefix_cache(reset_running_requests=True)
        if steps == 16:
            engine.abort_request(["3"])
    summaries = [r for r in overlapping.records() if r["schema"] == "witcert.request/1"]
    assert sorted(s["finish_reason"] for s in summaries[3:]) == ["abort", *["length"] * 5]
    for summary in summaries:
        assert summary["audit"]["violations"] == 0 < summary["audit"]["cells"]
        assert summary["cells_measured"] + summary["cells_unknown"] == summary["rows_seen"] * LAYERS * HEADS
    assert not scheduler.connector.ledger._requests
