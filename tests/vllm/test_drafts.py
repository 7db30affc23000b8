"""Speculative decoding: rows of drafts are metered as they are verified, and count when their token is served.

Every metered row is audited, its weights and its output; what drafts made of is in `tests/zoo/drafters.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import prompts
from engine import Answer, Cells, running_engine, write_policy
from servers import running_server

from tests.zoo.drafters import make_eagle, make_mtp
from tests.zoo.families import make_checkpoint
from witcert_core.report.claims import ADAPTIVE_DRAFTS

pytestmark = pytest.mark.vllm

AUDITED = {"stride": 1, "audit_every": 1, "max_rows": 4}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
COUNTED = ("rows_seen", "rows_metered", "cells_measured", "cells_exact", "cells_unknown", "tokens_read")


def served(
    model: Path, work: Path, policy: dict[str, Any], drafts: dict[str, Any] | None, **options: Any
) -> list[tuple[Answer, Cells]]:
    """Answers, twice in one batch each: the second time all but a prompt's last token may come from the cache, and
    vLLM fills its pass up with placeholders for drafts."""
    options = {"block_size": 32, **options}
    if drafts is not None:
        options["speculative_config"] = dict(drafts)
    with running_engine(model, work, {"meter": AUDITED, **policy}, **options) as engine:
        asked = prompts(seed=81, num_tokens=97)[:2]
        answers = [a for _ in range(2) for a in engine.ask(asked, max_tokens=24, ignore_eos=True)]
        return [(answer, engine.cells(answer)) for answer in answers]


def assert_same(ours: list[tuple[Answer, Cells]], theirs: list[tuple[Answer, Cells]]) -> None:
    """Tokens, counts and bounds of the served rows."""
    for (our, our_cells), (their, their_cells) in zip(ours, theirs, strict=True):
        assert our.tokens == their.tokens
        assert our_cells.keys() == their_cells.keys()
        assert list(our_cells.values()) == pytest.approx([their_cells[at] for at in our_cells], abs=1e-4)
        assert {key: our.summary[key] for key in COUNTED} == {key: their.summary[key] for key in COUNTED}


def assert_audited(found: list[tuple[Answer, Cells]], rejected: bool = True) -> None:
    """No bound was broken (`cells` has looked), nothing went unaudited, and some drafts were wrong."""
    for answer, cells in found:
        audit = answer.summary["audit"]
        assert audit["cells"] == audit["outputs"] == len(cells) > 0
        assert answer.summary["unknown_reasons"].keys() <= {"max_rows"}
    assert any(answer.summary["rows_rejected"] for answer, _ in found) == rejected


def test_served_rows_are_those_of_serving_without_drafts(checkpoint: Path, tmp_path: Path) -> None:
    """Of a draft model too that is often right."""
    model = {"method": "draft_model", "model": str(checkpoint), "num_speculative_tokens": 3}
    policy = {"quantizer": {"name": "int4_token_group"}}
    plain = served(checkpoint, tmp_path / "plain", policy, None)
    assert_audited(plain, rejected=False)
    for drafts in (NGRAM, model):
        drafted = served(checkpoint, tmp_path / str(drafts["method"]), policy, drafts)
        assert_audited(drafted)
        assert [answer.cached for answer, _ in drafted] == [0, 0, 96, 96]
        assert_same(drafted, plain)


def test_texts_end_where_a_draft_ends_them(checkpoint: Path, tmp_path: Path) -> None:
    """Rows behind the last token that is served are left out, though their drafts were right."""
    model = {"method": "draft_model", "model": str(checkpoint), "num_speculative_tokens": 4}
    policy = {"quantizer": {"name": "int8_token_group"}, "meter": AUDITED}
    with running_engine(checkpoint, tmp_path, policy, speculative_config=model) as engine:
        for answer in engine.ask(prompts(seed=82, num_tokens=96)):
            assert answer.finish_reason == "stop"
            decode = {position for position, _layer, _head in engine.cells(answer) if position >= 96}
            assert decode == set(range(96, 96 + len(answer.tokens) - 1))


EAGLE = {"method": "eagle", "num_speculative_tokens": 3}


def eagle(checkpoint: Path, work: Path) -> tuple[Path, dict[str, Any]]:
    return checkpoint, {**EAGLE, "model": str(make_eagle(checkpoint, work / "eagle"))}


def mtp(_checkpoint: Path, work: Path) -> tuple[Path, dict[str, Any]]:
    return make_mtp(work / "model"), {"method": "mtp", "num_speculative_tokens": 2}


def windowed(_checkpoint: Path, work: Path) -> tuple[Path, dict[str, Any]]:
    return make_checkpoint("gemma3", work / "model"), NGRAM


@pytest.mark.parametrize("made", [eagle, mtp, windowed])
def test_bounds_and_outputs_hold(
    made: Callable[[Path, Path], tuple[Path, dict[str, Any]]], checkpoint: Path, tmp_path: Path
) -> None:
    model, drafts = made(checkpoint, tmp_path)
    policy = {"quantizer": {"name": "int8_dither"}}
    found = served(model, tmp_path, policy, drafts, max_model_len=512, kv_cache_memory_bytes=64 << 20)
    assert_audited(found)
    for answer, _ in found:
        claim, tier = answer.summary["claim"], answer.summary["tier"]
        if made is windowed:
            assert tier == "probabilistic"
        else:  # what drafts they make depends on the dither that they read
            assert (tier, ADAPTIVE_DRAFTS in claim) == ("deterministic", True)
            assert answer.summary["delta"]["spent"] == 0


def test_groups_of_tokens_close_without_drafts(checkpoint: Path, tmp_path: Path) -> None:
    """A group that held a wrong draft would be quantized in part already when its place is written again."""
    policy = {"quantizer": {"name": "kivi", "params": {"bits": 4, "residual": 32}}}
    assert_audited(served(checkpoint, tmp_path, policy, NGRAM))


def test_packed_codes_and_what_rejected_rows_spent(checkpoint: Path, tmp_path: Path) -> None:
    policy = {"quantizer": {"name": "int8_dither", "storage": "packed"}, "prefill_reads": "stored"}
    found = served(checkpoint, tmp_path, policy, NGRAM)
    assert_audited(found)
    for answer, _ in found:
        assert answer.summary["tier"] == "probabilistic"
        rows = answer.summary["rows_metered"] + answer.summary["rows_rejected"]
        share = 6 / math.pi**2 * sum(1 / t**2 for t in range(1, rows + 1))
        assert answer.summary["delta"]["spent"] == pytest.approx(answer.summary["delta"]["request"] * share)


def test_a_gate_acts_on_rows_of_drafts_and_tells_of_served_ones(twin: Path, tmp_path: Path) -> None:
    policy = {
        "quantizer": {"name": "fp8_e4m3_cast"},
        "gate": {"kind": "combined"},
    }
    found = served(twin, tmp_path, policy, NGRAM)
    assert_audited(found)
    for answer, _ in found:
        summary = answer.summary
        assert summary["gate"]["repaired_blocks"] > 0
        gate = summary["gate"]
        assert gate["within_target"] + gate["above_target"] + gate["ranked"] + gate["exact"] == (
            summary["cells_measured"] + summary["cells_exact"]
        )


def test_a_server_tells_clients(checkpoint: Path, tmp_path: Path) -> None:
    policy = write_policy(tmp_path / "policy.yaml", quantizer={"name": "int4_token_group"}, meter=AUDITED)
    options = ["--served-model-name", "m", "--speculative-config", json.dumps(NGRAM)]
    body = {"model": "m", "prompt": prompts(seed=83)[0], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    with (
        running_server(checkpoint, policy=policy, log=tmp_path / "log", options=options) as server,
        server.client() as client,
    ):
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
    (summary,) = answer["kv_transfer_params"]["witcert"]
    assert (summary["rows_metered"], answer["usage"]["completion_tokens"]) == (23, 24)
    assert summary["rows_rejected"] > 0
    assert summary["audit"]["violations"] == summary["audit"]["mismatches"] == 0 < summary["audit"]["cells"]
