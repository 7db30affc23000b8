"""A sample of requests under vLLM: the truth is told beside the bounds, over packed pages and a cached prefix too."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import prompts
from engine import running_engine

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("storage", ["simulated", "packed"])
def test_every_metered_row_of_the_sample_is_compared(checkpoint: Path, tmp_path: Path, storage: str) -> None:
    policy = {
        "quantizer": {"name": "int8_dither", "storage": storage},
        "meter": {"stride": 1, "max_rows": 4, "audit_share": 1.0, "sketch_share": 1.0, "share_bytes": 1 << 22},
    }
    with running_engine(checkpoint, tmp_path, policy, max_num_batched_tokens=128) as engine:
        status = engine.llm.collective_rpc("witcert_status")[0]
        assert 0 < status["bytes_sample"] <= 1 << 22
        assert 0 < status["bytes_sketches"] <= 1 << 22
        assert status["bytes_audit_copies"] == 0
        asked = prompts(seed=61, num_tokens=256)
        cold = engine.ask(asked)
        warm = engine.ask(asked[:1])[0]  # its prefix has the copies of whoever computed it
    assert warm.cached > 0
    for answer in (*cold, warm):
        sample = answer.summary["sample"]
        assert sample["cells"] == answer.summary["cells_measured"] > 0
        assert sample["violations"] == 0
        assert sample["rows_not_audited"] == {}
        assert 0 < sample["tv"]["p50"] <= answer.summary["worst"]["meter"]
        assert sample["bound_over_tv"]["p50"] > 1
        assert sample["sketched"]["cells"] == sample["cells"]
        assert sample["sketched"]["rows_not_sketched"] == {}
        assert 1 < sample["sketched"]["bound_over_tv"]["p50"] < sample["bound_over_tv"]["p50"]
