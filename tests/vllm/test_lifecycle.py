"""What the scheduler does to a request leaves its tokens and its bounds alone.

`busy` computes prompts in small chunks mixed with decode rows, in a cache that holds a few of them, so requests are
preempted and blocks reused. `quiet` has none of that. Quantizer and prompt reads are deterministic, so both must
report alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import prompts
from engine import HEADS, LAYERS, Answer, Cells, Engine, running_engine

pytestmark = pytest.mark.vllm

POLICY = {
    "quantizer": {"name": "int8_token_group"},
    "prefill_reads": "stored",
    "meter": {"stride": 1, "audit_every": 1, "max_rows": 2},
}
LONG = {"max_tokens": 24, "ignore_eos": True}


def reported(engine: Engine, asked: list[str], **sampling: object) -> list[tuple[Answer, Cells]]:
    return [(answer, engine.cells(answer)) for answer in engine.ask(asked, **sampling)]


@pytest.fixture(scope="module")
def together() -> list[str]:
    """Prompts that are asked at once."""
    return prompts(seed=33, count=2, num_tokens=128)


@pytest.fixture(scope="module")
def quiet(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, together: list[str]
) -> list[tuple[Answer, Cells]]:
    """Every prompt of `together` alone in an empty cache, in one chunk."""
    with running_engine(checkpoint, tmp_path_factory.mktemp("quiet"), POLICY, enable_prefix_caching=False) as engine:
        return [reported(engine, [prompt], **LONG)[0] for prompt in together]


@pytest.fixture(scope="module")
def busy(quiet: object, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """After `quiet`: there is one engine at a time in a process."""
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "block_size": 32}
    options |= {"num_gpu_blocks_override": 20, "max_model_len": 512}
    with running_engine(checkpoint, tmp_path_factory.mktemp("busy"), POLICY, **options) as engine:
        yield engine


def assert_same_meter(ours: Cells, theirs: Cells, rows: int, tolerance: float = 1e-3) -> None:
    """The cells both measured, of at least `rows` query rows, have the same bounds."""
    common = sorted(ours.keys() & theirs.keys())
    assert len(common) >= rows * LAYERS * HEADS
    assert max(ours[key] for key in common) > 10 * tolerance
    assert [ours[key] for key in common] == pytest.approx([theirs[key] for key in common], abs=tolerance)


def test_chunks_preemption_and_block_reuse_change_nothing(
    busy: Engine, quiet: list[tuple[Answer, Cells]], together: list[str]
) -> None:
    scheduler = busy.llm.llm_engine.engine_core.engine_core.scheduler
    preempted: set[str] = set()
    original = scheduler._preempt_request

    def count(request: Any, *args: object, **kwargs: object) -> object:
        preempted.add(request.request_id)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = count
    try:
        stressed = reported(busy, together, **LONG)
    finally:
        scheduler._preempt_request = original
    assert preempted
    for (ours, our_cells), (theirs, their_cells) in zip(stressed, quiet, strict=True):
        assert ours.tokens == theirs.tokens
        assert_same_meter(our_cells, their_cells, rows=len(theirs.tokens) - 1)


def test_a_cached_prefix_changes_nothing(busy: Engine) -> None:
    prompt = prompts(seed=34)[0]
    (cold, cold_cells), (warm, warm_cells) = (reported(busy, [prompt])[0] for _ in range(2))
    assert cold.cached < 32
    assert warm.cached >= 224
    assert warm.tokens == cold.tokens
    assert_same_meter(warm_cells, cold_cells, rows=len(cold.tokens) - 1)


def test_every_row_is_accounted_for(busy: Engine) -> None:
    for answer, cells in reported(busy, prompts(seed=35)):
        summary = answer.summary
        assert summary["cells_measured"] + summary["cells_unknown"] == summary["rows_seen"] * LAYERS * HEADS
        assert set(summary["unknown_reasons"]) <= {"max_rows"}
        decode = {position for position, _layer, _head in cells if position >= 256}
        assert decode == set(range(256, 256 + len(answer.tokens) - 1))  # the last token is never read


def test_choices_of_one_prompt_have_a_summary_each(busy: Engine) -> None:
    (prompt,) = prompts(seed=36)[:1]
    choices = busy.ask([prompt], n=3, temperature=1.0, max_tokens=4, ignore_eos=True)
    assert len({choice.summary["request_id"] for choice in choices}) == 3
    for choice in choices:
        assert choice.summary["finish_reason"] == "length"
        decode = {p for p, _layer, _head in busy.cells(choice) if p >= 256}
        assert decode == set(range(256, 256 + len(choice.tokens) - 1))


def test_an_aborted_request_is_reported_and_forgotten(busy: Engine) -> None:
    engine = busy.llm.llm_engine
    (prompt,) = prompts(seed=37)[:1]
    from vllm import SamplingParams

    engine.add_request("gone", prompt, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    for _ in range(10):
        engine.step()
    engine.abort_request(["gone"])
    engine.step()
    (summary,) = [
        r for r in busy.records() if r["request_id"].startswith("gone") and r["schema"].startswith("witcert.request")
    ]
    assert summary["finish_reason"] == "abort"
    assert summary["rows_metered"] > 0
    assert not busy.llm.llm_engine.engine_core.engine_core.scheduler.connector.ledger._requests


def test_an_id_used_again_answers_with_its_own_choices(busy: Engine) -> None:
    """Clients choose ids: a later request must not carry the choices of an earlier one, nor those of a like id."""
    from vllm import SamplingParams
    from witcert_vllm.http import STATE

    engine = busy.llm.llm_engine
    (prompt,) = prompts(seed=38)[:1]
    carried = []
    for name, count in (("again", 3), ("again-0", 1), ("again", 1)):
        engine.add_request(name, prompt, SamplingParams(temperature=1, n=count, max_tokens=2, ignore_eos=True))
        while engine.has_unfinished_requests():
            carried += [out.kv_transfer_params["witcert"] for out in engine.step() if out.finished]
    assert [len(summaries) for summaries in carried] == [3, 1, 1]
    found = {name: json.loads(STATE.summaries.reply(name).body) for name in ("again", "again-0")}
    assert found == {"again": carried[2][0], "again-0": carried[1][0]}
