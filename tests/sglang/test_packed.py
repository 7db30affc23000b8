"""The packed INT8 pool on SGLang's own objects: read as stored, bounded, and closed to every other writer."""

from __future__ import annotations

import pytest
import torch
from engine import HKV, LAYERS, SLOTS, D, Engine, attention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("name", ["int8_dither", "int8_dither_w"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("reads", ["chunk_exact", "stored"])
def test_the_packed_pool_is_read_and_bounded(name: str, dtype: torch.dtype, reads: str) -> None:
    engine = Engine(name, dtype, storage="packed", prefill_reads=reads)
    engine.step([7, 31], ForwardMode.EXTEND)
    engine.step([5, 2], ForwardMode.EXTEND)
    step, queries, outputs = engine.step([1, 1], ForwardMode.DECODE)
    assert engine.pool.k_buffer[0].dtype == torch.int8
    width = 2 * (D + 2 * 2) + (2 if name == "int8_dither_w" else 0)
    assert engine.runtime.cache.cache.nbytes == LAYERS * HKV * (SLOTS + 1) * width
    for layer in range(LAYERS):
        cells = step.layers[layer]
        for i, count in enumerate(engine.lens):
            q = queries[layer][i].to(dtype).float()
            out, compressed = attention(q, *engine.stored(layer, i, count))
            exact_out, exact = attention(q, *(engine.exact[layer][kind][i, :count] for kind in "kv"))
            assert torch.allclose(outputs[layer][i].double(), out, atol=2e-2 if dtype == torch.bfloat16 else 1e-4)
            assert ((exact - compressed).abs().sum(-1) / 2 <= cells.meter[i]).all()
            assert ((exact_out - out).norm(dim=-1) <= cells.out_bound[i]).all()
            assert (cells.tv_audit[i] <= cells.meter[i]).all()
            assert (cells.meter[i] < 0.5).all()
        assert (step.witness_layers[layer].meter >= cells.meter).all()


def test_a_packed_chunk_reads_itself_exactly() -> None:
    engine = Engine("int8_dither", storage="packed")
    engine.step([5, 9], ForwardMode.EXTEND)
    _, queries, outputs = engine.step([4, 3], ForwardMode.EXTEND)
    token = 0
    for i, (old, new) in enumerate(((5, 4), (9, 3))):
        k, v = engine.stored(1, i, old)
        for offset in range(new):
            own_k, own_v = (engine.exact[1][kind][i, old : old + offset + 1] for kind in "kv")
            out, _ = attention(queries[1][token], torch.cat([k, own_k]), torch.cat([v, own_v]))
            assert torch.allclose(outputs[1][token].double(), out, atol=1e-4)
            token += 1


def test_a_write_past_the_packed_backend_is_an_error() -> None:
    engine = Engine("int8_dither", storage="packed")
    with pytest.raises(NotImplementedError, match="unmetered"):
        engine.pool.set_kv_buffer(engine.layers[0], torch.tensor([3]), torch.zeros(1, HKV, D), torch.zeros(1, HKV, D))
