"""vLLM's answers report what they reported when they were recorded; see `recorded.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import recorded
import torch
from conftest import prompts
from engine import running_engine

pytestmark = pytest.mark.vllm

AUDITED = {"stride": 1, "audit_every": 1, "max_rows": 2}
SAMPLED = {"stride": 1, "max_rows": 2, "audit_share": 0.6, "sketch_share": 0.6, "share_seed": 3}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "int8_dither, packed": ({"quantizer": {"name": "int8_dither", "storage": "packed"}, "meter": AUDITED}, {}),
    "int8_dither_w, packed, gated": (
        {
            "quantizer": {"name": "int8_dither_w", "storage": "packed"},
            "prefill_reads": "stored",
            "gate": {"kind": "certified", "tau": 0.002, "target": "tv"},
        },
        {},
    ),
    "int8_dither, strides": (
        {"quantizer": {"name": "int8_dither"}, "meter": {"stride": 3, "audit_every": 2, "layers": "1-3"}},
        {},
    ),
    "fp8_e4m3_cast, sampled": (
        {"quantizer": {"name": "fp8_e4m3_cast"}, "meter": SAMPLED, "prefill_reads": "stored"},
        {},
    ),
    "int4_token_group, repaired": (
        {"quantizer": {"name": "int4_token_group"}, "meter": {"audit_every": 1}, "gate": {"kind": "combined"}},
        {},
    ),
    "fp8_e4m3_cast, risk ranked": (
        {"quantizer": {"name": "fp8_e4m3_cast"}, "gate": {"kind": "risk_ranked", "copy_bytes": 400_000}},
        {},
    ),
    "kivi": (
        {"quantizer": {"name": "kivi", "params": {"bits": 4, "residual": 64}}, "meter": {**AUDITED, "sketch_bits": 4}},
        {"block_size": 64},
    ),
    "engine, fp8": (
        {"quantizer": {"name": "engine"}, "prefill_reads": "stored", "meter": AUDITED},
        {"kv_cache_dtype": "fp8"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_answers(case: str, checkpoint: Path, twin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in chunks, the same and more behind it, and three at once."""
    policy, options = CASES[case]
    if "kv_cache_dtype" in options and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's fp8 cache on a CPU needs AVX-512")
    monkeypatch.setattr("secrets.randbits", lambda _bits: recorded.NONCE)
    first, *others = prompts(seed=19, num_tokens=96 if "gate" in policy else 160)
    turns = [[first], [first + others[0][:40]], [first, *others]]
    model = checkpoint
    if "gate" in policy:  # repairs take their time
        model, turns = twin, turns[1:]
    answers = []
    with running_engine(model, tmp_path, policy, max_num_batched_tokens=64, **options) as engine:
        for asked in turns:
            answers += engine.ask(asked, max_tokens=6, ignore_eos=True)
        records = engine.records()
    recorded.check("vllm", case, [recorded.run_of(a.tokens, a.summary, records) for a in answers])
