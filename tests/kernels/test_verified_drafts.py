"""SGLang's passes that verify drafts, under its own Triton kernels, interpreted: its pool, batch and verify input."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")
sys.path.insert(0, str(Path(__file__).parents[1] / "sglang"))

from engine import HQ, LAYERS, SCALE, Engine, chain, triton_backend
from sglang.srt.managers.auxiliary_output import CommittedTokens
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from test_groups import attended
from witcert_sglang.results import StepOutput
from witcert_sglang.runtime import verified_tokens

from tests.kernels.test_window_pool import WINDOW_LEFT, Windowed
from witcert_core.errors import UnsupportedError
from witcert_core.meter.attention import AttentionSpec


def verify(engine: Engine, drafts: int, right: tuple[int, int]) -> None:
    """One pass over the newest token of both requests and drafts, of which right[i] are; audited against float64."""
    before = list(engine.lens)
    step, queries, _ = engine.step([1 + drafts, 1 + drafts], ForwardMode.TARGET_VERIFY)
    for number, row in enumerate(step.rows):
        assert row.draft == row.position - before[row.request]
        for layer, cells in step.layers.items():
            window = engine.layers[layer].sliding_window_size
            spec = AttentionSpec(SCALE, window_left=window)
            exact, stored = attended(engine, layer, spec, row.request, row.position, queries[layer][row.token])
            assert (0.5 * (exact - stored).abs().sum(-1) <= cells.meter[number]).all()
    commits = [CommittedTokens(0, tuple(range(1 + count))) for count in right]
    fields: dict[str, Any] = {"is_retracted": False, "is_prefill_only": False, "finished": lambda: False}
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid=rid, **fields) for rid in "ab"])
    StepOutput(engine.runtime, step).consume(batch, commits)
    engine.lens = [length + 1 + count for length, count in zip(before, right, strict=True)]


@pytest.mark.parametrize(
    ("quantizer", "params"), [("int4_token_group", {}), ("int8_dither", {}), ("kivi", {"residual": 32, "bits": 4})]
)
def test_chains_of_drafts(quantizer: str, params: dict[str, Any]) -> None:
    engine = Engine(quantizer, params=params, stock=triton_backend)
    engine.step([14, 27], ForwardMode.EXTEND)
    served = [0, 0]
    for drafts, right in ((3, (0, 3)), (2, (1, 0)), (3, (3, 1)), (1, (0, 0)), (3, (2, 2))):
        verify(engine, drafts, right)
        served = [count + 1 + more for count, more in zip(served, right, strict=True)]
    for rid, rows in zip("ab", served, strict=True):
        found = engine.runtime.finish(rid, "stop")
        assert (found["rows_metered"], found["rows_rejected"], found["rows_seen"]) == (rows, 17 - rows, rows)
        assert found["audit"]["cells"] == found["audit"]["outputs"] == rows * LAYERS * HQ
        assert found["audit"]["violations"] == found["audit"]["mismatches"] == 0
        assert found["tier"] == ("probabilistic" if quantizer == "int8_dither" else "deterministic")


def test_windows_in_a_pool_of_their_own() -> None:
    engine = Windowed("int4_token_group")
    engine.step([14, 5], ForwardMode.EXTEND)
    for right in ((0, 2), (2, 1), (1, 0), (2, 2)):
        verify(engine, 2, right)
        for row, length in zip(engine.rows, engine.lens, strict=True):  # SGLang takes slots of wrong drafts back
            mapping, gone = engine.pool.full_to_swa_index_mapping, engine.requests.req_to_token[row, length:].long()
            engine.free += [int(slot) for slot in mapping[gone] if slot]
            mapping[gone] = 0
    for rid in "ab":
        found = engine.runtime.finish(rid, "stop")
        assert found["audit"]["violations"] == found["audit"]["mismatches"] == 0
        assert found["audit"]["cells"] == found["audit"]["outputs"] == found["rows_metered"] * LAYERS * HQ > 0
    assert max(engine.lens) > 2 * WINDOW_LEFT


def test_a_tree_is_refused() -> None:
    batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY, spec_info=chain([4], 3, topk=2))
    with pytest.raises(UnsupportedError, match=r"a tree of drafts .*--speculative-eagle-topk 1"):
        verified_tokens(batch)
    batch.spec_info = chain([4], 3)
    assert verified_tokens(batch) == 3
    batch.forward_mode = ForwardMode.DECODE
    assert verified_tokens(batch) == 0
