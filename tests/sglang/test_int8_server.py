"""The dithered INT8 cache on the original model: certified, right, and honest about rows between the stride."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Metered, ask_many, check_recorded, samples_of_each_task

pytestmark = pytest.mark.sglang


def test_recorded(int8_original: Metered) -> None:
    check_recorded("int8_dither, strides", int8_original)


def test_answers_bounds_and_claim(int8_original: Metered) -> None:
    asked = ask_many(int8_original.server, samples_of_each_task(6))
    assert sum(a.right for a in asked) >= 0.95 * len(asked)
    summaries = [a.summary for a in asked if a.summary is not None]
    assert len(summaries) == len(asked)
    measured = sum(s["cells_measured"] for s in summaries)
    assert sum(s["tv_certified_cells"] for s in summaries) >= 0.9 * measured > 0
    assert sum(s["audit"]["violations"] + s["audit"]["mismatches"] for s in summaries) == 0
    assert sum(s["audit"]["cells"] for s in summaries) > 100
    for summary in summaries:
        assert summary["tier"] == "probabilistic"
        assert "non-adaptive" in summary["claim"]
        assert 0 < summary["delta"]["spent"] <= summary["delta"]["request"]
        assert summary["deterministic_beside"]["cells"] == summary["cells_measured"]


def test_rows_between_the_stride_are_unknown(int8_original: Metered) -> None:
    prompt = samples_of_each_task(1, seed=5)[0].prompt
    reply = int8_original.generate(prompt, max_new_tokens=8, ignore_eos=True)
    summary = reply["meta_info"]["witcert"]
    decode_rows = reply["meta_info"]["completion_tokens"] - 1
    prompt_rows = reply["meta_info"]["prompt_tokens"] - reply["meta_info"]["cached_tokens"]
    assert summary["rows_seen"] == decode_rows + prompt_rows
    assert summary["rows_metered"] == -(-decode_rows // 3) + 2  # every third decode row; max_rows of the prompt
    assert summary["cells_unknown"] == (summary["rows_seen"] - summary["rows_metered"]) * 16
    assert set(summary["unknown_reasons"]) == {"stride", "max_rows"}


def test_a_second_turn_over_sampled_tokens_claims_tier_w(int8_original: Metered) -> None:
    """The next turn of a chat hits pages that hold the sampled tokens of the first."""

    def ask(ids: list[int], count: int) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        with int8_original.server.client() as client:
            answer = client.post("/generate", json={"input_ids": ids, "sampling_params": sampling})
        return dict(answer.raise_for_status().json())

    prompt = [10 + 7 * i % 50 for i in range(100)]
    first = ask(prompt, 48)
    second = ask(prompt + first["output_ids"] + prompt[:20], 8)["meta_info"]
    assert second["cached_tokens"] > len(prompt) + 16
    summary = second["witcert"]
    assert (first["meta_info"]["witcert"]["tier"], summary["tier"]) == ("probabilistic", "deterministic")
    assert "its cached prefix holds tokens that were sampled" in summary["claim"]
    assert summary["tier_cells"] == {"deterministic": summary["cells_measured"]}
    assert summary["delta"]["spent"] == 0
    assert summary["audit"]["violations"] == 0


def test_stored_prefill_cold_equals_warm(int8_original: Metered) -> None:
    prompt = samples_of_each_task(1, seed=9)[1].prompt
    cold, warm = int8_original.generate(prompt), int8_original.generate(prompt)
    assert warm["meta_info"]["cached_tokens"] > 400 > cold["meta_info"]["cached_tokens"]
    assert warm["output_ids"] == cold["output_ids"]
