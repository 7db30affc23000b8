"""The packed INT8 pool on SGLang's own objects: read as stored, bounded, and closed to every other writer."""

from __future__ import annotations

import pytest
import torch
from audits import audit_of
from engine import HKV, HQ, LAYERS, SLOTS, D, Engine, gated
from layer_pool import attention
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
    assert engine.packed.cache.nbytes == LAYERS * HKV * (SLOTS + 1) * width
    for layer in range(LAYERS):
        cells = step.layers[layer]
        for i, count in enumerate(engine.lens):
            q = queries[layer][i].to(dtype).float()
            out, compressed = attention(q, *engine.stored(layer, i, count))
            exact_out, exact = attention(q, engine.exact[layer]["k"][i, :count], engine.exact[layer]["v"][i, :count])
            assert torch.allclose(outputs[layer][i].double(), out, atol=2e-2 if dtype == torch.bfloat16 else 1e-4)
            assert ((exact - compressed).abs().sum(-1) / 2 <= cells.meter[i]).all()
            assert ((exact_out - out).norm(dim=-1) <= cells.out_bound[i]).all()
            assert (audit_of(cells)[i] <= cells.meter[i]).all()
            assert (cells.meter[i] < 0.5).all()
        assert (step.deterministic_layers[layer].meter >= cells.meter).all()


OUTLIERS = dict.fromkeys((30, 31, 62, 63), 40.0)  # two rotary pairs


@pytest.mark.parametrize("reads", ["chunk_exact", "stored"])
@pytest.mark.parametrize("gate", [False, True], ids=["observe", "certified"])
def test_outliers_beside_the_codes_are_exact_and_tighten_the_rest(reads: str, gate: bool) -> None:
    """Bypassed channels cost 16 bit each and leave the scales of the others alone."""
    found = {}
    for name, params in (("int8_dither", {}), ("int8_dither_bypass", {"pairs": 2})):
        chosen = {"kind": "certified", "block_size": 4, "tau": 0.05, "target": "tv"} if gate else {"kind": "observe"}
        engine = Engine(
            name, torch.bfloat16, storage="packed", params=params, prefill_reads=reads, outliers=OUTLIERS, gate=chosen
        )
        engine.step([7, 31], ForwardMode.EXTEND)
        engine.step([5, 2], ForwardMode.EXTEND)
        step, queries, outputs = engine.step([1, 1], ForwardMode.DECODE)
        for layer in range(LAYERS):
            cells = step.layers[layer]
            for i, count in enumerate(engine.lens):
                q = queries[layer][i].bfloat16().float()
                k, v = engine.stored(layer, i, count)
                out, compressed = attention(q, k, v)
                exact_k, exact_v = (engine.exact[layer][kind][i, :count] for kind in "kv")
                exact_out, exact = attention(q, exact_k, exact_v)
                assert torch.allclose(outputs[layer][i].double(), out, atol=2e-2)
                assert ((exact - compressed).abs().sum(-1) / 2 <= cells.meter[i]).all()
                assert ((exact_out - out).norm(dim=-1) <= cells.out_bound[i]).all()
                assert (audit_of(cells)[i] <= cells.meter[i]).all()
                if params:
                    assert torch.equal(k[..., list(OUTLIERS)], exact_k[..., list(OUTLIERS)])
        worst = max(float(cells.meter.max()) for cells in step.layers.values())
        found[name] = worst, engine.packed.cache.nbytes, sum(v.repaired_bytes for v in step.verdicts)
    if gate:
        assert found["int8_dither_bypass"][2] < found["int8_dither"][2]
    else:
        assert found["int8_dither_bypass"][0] < 0.5 * found["int8_dither"][0]
    width = 2 * (D + 2 * 2)
    slots = LAYERS * HKV * (SLOTS + 1)
    assert [size for _, size, _ in found.values()] == [slots * width, slots * (width + 2 * 2 * 2)]


def test_an_outlier_that_is_no_number_makes_its_token_unknown() -> None:
    engine = Engine("int8_dither_bypass", torch.bfloat16, storage="packed", outliers=OUTLIERS)
    engine.step([7, 31], ForwardMode.EXTEND)
    cache = engine.packed.cache
    slots = engine.requests.req_to_token[engine.rows[0], :1].long()
    keys, values = (torch.randn(1, HKV, D).bfloat16() for _ in range(2))
    channels = cache[0].channels
    assert channels is not None
    keys[0, 1, int(channels[1, 0])] = float("inf")
    k, v = engine.runtime.groups[0].encoder.encode(0, slots, torch.tensor([0]), cache.to_encode(0, keys), values)
    assert k.codes is not None
    assert v.codes is not None
    cache.write(0, slots, keys, values, k.codes, v.codes)
    q = torch.randn(HQ, D, dtype=torch.float64)
    radius = cache[0].key_radius(q, slots, 1.0, 0.0)[:, 0]
    assert radius[: HQ // 2].isfinite().all()
    assert radius[HQ // 2 :].isinf().all()


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


@pytest.mark.parametrize("name", ["int8_dither", "int4_token_group"])
def test_a_write_past_the_packed_backend_is_an_error(name: str) -> None:
    engine = Engine(name, storage="packed")
    with pytest.raises(NotImplementedError, match="unmetered"):
        engine.pool.set_kv_buffer(engine.layers[0], torch.tensor([3]), torch.zeros(1, HKV, D), torch.zeros(1, HKV, D))


@pytest.mark.parametrize("name", ["int8_dither", "int8_dither_w", "int4_token_group"])
def test_a_gate_over_codes_serves_what_it_certified(name: str) -> None:
    """Exact blocks beside the packed pool: what is certified is attention over the mixture that is read."""
    engine = gated(name, storage="packed", tau=0.02, tau_out=0.02)
    engine.step([17, 31], ForwardMode.EXTEND)
    codes = [buffer.clone() for buffer in engine.pool.k_buffer]
    moved = 0
    for _ in range(3):
        step, queries, outputs = engine.step([1, 1], ForwardMode.DECODE)
        moved += sum(verdict.repaired_bytes for verdict in step.verdicts)
        for layer in range(LAYERS):
            cells = step.layers[layer]
            assert (cells.meter <= 0.02).all()
            assert (audit_of(cells) <= cells.meter).all()
            for i, count in enumerate(engine.lens):
                out, compressed = attention(queries[layer][i], *engine.stored(layer, i, count))
                exact_out, exact = attention(
                    queries[layer][i], engine.exact[layer]["k"][i, :count], engine.exact[layer]["v"][i, :count]
                )
                assert torch.allclose(outputs[layer][i].double(), out, atol=1e-4)
                assert ((exact - compressed).abs().sum(-1) / 2 <= cells.meter[i]).all()
                assert ((exact_out - out).norm(dim=-1) <= cells.out_bound[i]).all()
    assert 0 < moved <= LAYERS * HKV * sum(engine.lens) * 2 * D * 4  # a block at most once
    slots = torch.cat([engine.requests.req_to_token[row, :17] for row in engine.rows]).long()
    assert all(torch.equal(a[slots], b[slots]) for a, b in zip(codes, engine.pool.k_buffer, strict=True))


def test_a_gated_packed_chunk_reads_itself_exactly_and_a_repaired_prefix() -> None:
    engine = gated("int8_dither", storage="packed", tau=0.02, target="tv")
    engine.step([9, 14], ForwardMode.EXTEND)
    step, queries, outputs = engine.step([6, 5], ForwardMode.EXTEND)
    assert sum(verdict.repaired_blocks for verdict in step.verdicts) > 0
    token = 0
    for i, (old, new) in enumerate(((9, 6), (14, 5))):
        k, v = engine.stored(1, i, old)
        for offset in range(new):
            own_k, own_v = (engine.exact[1][kind][i, old : old + offset + 1] for kind in "kv")
            out, _ = attention(queries[1][token], torch.cat([k, own_k]), torch.cat([v, own_v]))
            assert torch.allclose(outputs[1][token].double(), out, atol=1e-4)
            assert (step.layers[1].meter[token] <= 0.02).all()
            token += 1


def test_copies_that_are_gone_leave_codes_and_their_bound() -> None:
    room = LAYERS * HKV * 2 * D * 4 * 20  # for twenty tokens
    engine = gated("int8_dither", storage="packed", tau=0.02, copy_bytes=room)
    engine.step([17, 31], ForwardMode.EXTEND)
    step, queries, _ = engine.step([1, 1], ForwardMode.DECODE)
    assert any("copies of the blocks left are gone" in verdict.gave_up for verdict in step.verdicts)
    for layer in range(LAYERS):
        for i, count in enumerate(engine.lens):
            k, v = engine.stored(layer, i, count)
            _, compressed = attention(queries[layer][i], k, v)
            _, exact = attention(queries[layer][i], engine.exact[layer]["k"][i, :count], v)
            assert ((exact - compressed).abs().sum(-1) / 2 <= step.layers[layer].meter[i]).all()


def test_a_reused_slot_of_a_repaired_block_is_codes_again() -> None:
    engine = gated("int8_dither", storage="packed", tau=0.02)
    engine.step([17, 31], ForwardMode.EXTEND)
    engine.step([1, 1], ForwardMode.DECODE)
    slots = engine.requests.req_to_token[engine.rows[0], :17].long()
    repaired = engine.packed.repaired
    assert repaired is not None
    assert repaired.exact(0, slots).any()
    engine.lens = [0, 0]
    engine.step([17, 31], ForwardMode.EXTEND)
    assert not repaired.exact(0, slots).any()
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    assert (audit_of(step.layers[0]) <= step.layers[0].meter).all()
    assert (step.layers[0].meter <= 0.02).all()
