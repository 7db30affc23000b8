"""Speculative decoding in a real SGLang server, under SGLang's Triton kernels, interpreted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import ask_many, samples_of_each_task, write_policy
from witcert_demo.servers import running_server

from tests.zoo.drafters import make_eagle
from witcert_core.report.claims import ADAPTIVE_DRAFTS

pytestmark = pytest.mark.sglang

CHAIN = ["--speculative-eagle-topk", "1", "--speculative-num-steps", "2", "--speculative-num-draft-tokens", "3"]
FULL_MASK = Path(__file__).with_name("full_mask")
ROWS = 4
"""Metered of a chunk."""


@pytest.mark.parametrize("algorithm", ["STANDALONE"])
def test_rows_of_drafts_count_when_their_token_is_served(algorithm: str, checkpoint: Path, tmp_path: Path) -> None:
    policy = write_policy(
        tmp_path / "policy.yaml",
        quantizer={"name": "int8_dither"},
        meter={"stride": 1, "audit_every": 1, "max_rows": ROWS},
    )
    drafter = checkpoint
    if algorithm == "EAGLE":
        drafter = make_eagle(checkpoint, tmp_path / "eagle", "LlamaForCausalLMEagle")
    options = ["--dtype", "float32", "--attention-backend", "triton", *CHAIN]
    options += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(drafter)]
    path = os.pathsep.join([str(FULL_MASK), os.environ.get("PYTHONPATH", "")])
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    with running_server(
        checkpoint, policy=policy, log=tmp_path / "log", options=options, environment=environment
    ) as server:
        samples = samples_of_each_task(1, num_tokens=64)
        asked = ask_many(server, samples)
    rejected = 0
    for sample, answer in zip(samples, asked, strict=True):
        assert answer.right
        assert answer.summary is not None
        summary, audit = answer.summary, answer.summary["audit"]
        assert audit["violations"] == audit["mismatches"] == 0
        assert audit["cells"] == audit["outputs"] == summary["cells_measured"] + summary["cells_exact"]
        of_chunks = ROWS if summary["unknown_reasons"] else 0  # over a prefix that another request has computed
        assert summary["rows_metered"] == of_chunks + len(sample.answer_ids) - 1
        assert (ADAPTIVE_DRAFTS in summary["claim"]) == (algorithm == "EAGLE")
        assert summary["tier"] == ("deterministic" if algorithm == "EAGLE" else "probabilistic")
        rejected += summary["rows_rejected"]
    assert rejected > 0
