"""What vLLM on a GPU goes through, in Triton's interpreter: kernels over vLLM's own pages, as its own memory lies."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import samples_of_each_task
from engine import in_own_process

pytestmark = pytest.mark.vllm

METER = {"stride": 1, "audit_every": 1, "max_rows": 2}


def test_kernels_serve_and_meter_packed_pages(checkpoint: Path, tmp_path: Path) -> None:
    """A cold prompt, the same again over its cached blocks, generated tokens: right answers, no audit broken.

    Over plain pages (`tests/kernels/test_vllm_pages.py`) vLLM itself needs a GPU: its own write asks for one.
    """
    sample = samples_of_each_task(1, num_tokens=48, seed=73)[0]
    policy = {"quantizer": {"name": "int8_dither_w", "storage": "packed"}, "meter": METER}
    asked, options = [sample.prompt] * 2, {"block_size": 32}
    found = in_own_process(checkpoint, tmp_path, policy, asked, options=options, TRITON_INTERPRET="1")
    assert found["summer"] == "PackedKernels"
    for answer in found["answers"]:
        assert answer["tokens"] == list(sample.answer_ids)
        audit = answer["summary"]["audit"]
        assert audit["violations"] == audit["mismatches"] == 0
        assert audit["outputs"] == answer["summary"]["cells_measured"] > 0
        assert 0 < audit["tv_max"] <= answer["summary"]["worst"]["meter"] < 1
    first, again = (answer["summary"]["cells_measured"] for answer in found["answers"])
    assert again > first
