"""A sample of requests on SGLang's own objects: true TV and output error within their bounds, in every storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine import LAYERS, Engine
from layer_pool import attention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

pytestmark = pytest.mark.sglang

CASES: list[tuple[str, dict[str, Any]]] = [
    ("int4_token_group", {}),
    ("int8_dither", {"storage": "packed"}),
    ("int8_dither", {"storage": "packed", "gate": {"kind": "certified", "tau": 0.002, "block_size": 4}}),
    ("engine", {"own_pool": torch.bfloat16, "dtype": torch.float32}),
]


@pytest.mark.parametrize(("name", "sections"), CASES, ids=str)
def test_the_truth_is_told_in_every_storage(name: str, sections: dict[str, Any]) -> None:
    sections = dict(sections)
    dtype = sections.pop("dtype", torch.float32)
    shares = {"audit_share": 1.0} if "gate" in sections else {"audit_share": 1.0, "sketch_share": 1.0}
    engine = Engine(name, dtype, meter={"audit_every": 0, **shares}, **sections)
    for new, mode in (([7, 31], ForwardMode.EXTEND), ([5, 2], ForwardMode.EXTEND), ([1, 1], ForwardMode.DECODE)):
        step, queries, _ = engine.step(new, mode)
        step.count(engine.runtime.ledger, {0, 1})
    for layer in range(LAYERS):
        truth, cells = step.truths[layer], step.layers[layer]
        assert truth.rows == [0, 1]
        for i, count in enumerate(engine.lens):
            q = queries[layer][i]
            out, compressed = attention(q, *engine.stored(layer, i, count))
            exact_out, exact = attention(q, engine.exact[layer]["k"][i, :count], engine.exact[layer]["v"][i, :count])
            torch.testing.assert_close(truth.tv[i], (exact - compressed).abs().sum(-1) / 2, rtol=1e-3, atol=1e-6)
            torch.testing.assert_close(truth.out[i], (exact_out - out).norm(dim=-1), rtol=1e-3, atol=1e-5)
            assert (truth.tv[i] <= cells.meter[i]).all()
            assert (truth.out[i] <= cells.out_bound[i]).all()
            if "gate" not in sections:  # refused: it changes what was sketched
                sketched = step.sketched[layer]
                assert sketched.rows == [0, 1]
                assert (truth.tv[i] <= sketched.tv[i]).all()
                assert (sketched.tv[i] < cells.meter[i])[cells.num_quantized[i] > 0].all()
    for rid in "ab":
        sample = engine.runtime.finish(rid, "stop")["sample"]
        assert sample["violations"] == 0
        assert sample["cells"] > 0
        assert sample["rows_not_audited"] == {}
        assert "gate" in sections or sample["sketched"]["rows_not_sketched"] == {}
    assert engine.runtime.status()["bytes_audit_copies"] == 0


def test_slots_that_the_engine_moves_or_restores_have_no_copies() -> None:
    engine = Engine("int4_token_group", meter={"audit_every": 0, "audit_share": 1.0, "sketch_share": 1.0})
    engine.step([7, 31], ForwardMode.EXTEND)
    slots = [engine.requests.req_to_token[row, :3].long() for row in engine.rows]
    engine.runtime.overwritten(slots[0])
    engine.runtime.moved(slots[1], slots[0])
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    assert not step.truths
    assert not step.sketched
    assert sorted(step.not_audited.values()) == [1, 1]
    assert sorted(step.not_sketched.values()) == [1, 1]
