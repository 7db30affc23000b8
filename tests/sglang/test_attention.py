"""The metered backend on SGLang's own pool: what is written, read and reported, compared with exact attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from audits import audit_of
from engine import HKV, HQ, LAYERS, D, Engine, gated
from layer_pool import attention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from witcert_core.errors import UnsupportedError
from witcert_core.serving.banner import banner_text

pytestmark = pytest.mark.sglang


BLACK_BOX = ("none", "fp8_e4m3_cast", "int8_token_group", "int4_token_group", "int2_token_group")


def test_an_error_of_the_model_is_what_its_user_reads() -> None:
    """Not what the layers that are missing then did to the meter, which is ready for another pass."""

    def raising(*_args: Any) -> Any:
        raise ValueError("this layer cannot multiply")

    engine = Engine("int8_token_group")
    engine.step([9, 7], ForwardMode.EXTEND)
    layer, engine.layers[1] = engine.layers[1], raising
    with pytest.raises(ValueError, match="this layer cannot multiply"):
        engine.step([1, 1], ForwardMode.DECODE)
    assert not engine.runtime.in_pass
    engine.layers[1] = layer
    assert len(engine.step([1, 1], ForwardMode.DECODE)[0].layers) == LAYERS


@pytest.mark.parametrize("name", [*BLACK_BOX, "int8_dither", "int8_dither_w"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_decode_is_bounded(name: str, dtype: torch.dtype) -> None:
    check_decode(name, Engine(name, dtype), dtype)


@pytest.mark.parametrize("name", ["fp8_e4m3_cast", "int4_token_group", "int2_token_group", "int8_dither"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_decode_is_bounded_with_a_sketch(name: str, dtype: torch.dtype) -> None:
    check_decode(name, Engine(name, dtype, meter={"sketch_bits": 4}), dtype)


def check_decode(name: str, engine: Engine, dtype: torch.dtype) -> None:
    engine.step([7, 31], ForwardMode.EXTEND)
    step, queries, outputs = engine.step([1, 1], ForwardMode.DECODE)
    assert [row.position for row in step.rows] == [7, 31]
    for layer in range(LAYERS):
        cells = step.layers[layer]
        for i, count in enumerate(engine.lens):
            q = queries[layer][i].to(dtype).float()
            k, v = engine.stored(layer, i, count)
            exact_k, exact_v = (engine.exact[layer][kind][i, :count] for kind in "kv")
            out, compressed = attention(q, k, v)
            exact_out, exact = attention(q, exact_k, exact_v)
            assert torch.allclose(outputs[layer][i].double(), out, atol=2e-2 if dtype == torch.bfloat16 else 1e-4)
            tv = (exact - compressed).abs().sum(-1) / 2
            assert (tv <= cells.meter[i]).all()
            assert ((exact_out - out).norm(dim=-1) <= cells.out_bound[i]).all()
            assert (audit_of(cells)[i] <= cells.meter[i]).all()
            if name == "none":
                assert (cells.meter[i] < (0.01 if dtype == torch.bfloat16 else 1e-3)).all()
            else:
                assert not torch.equal(k, exact_k)
                assert not torch.equal(v, exact_v)


@pytest.mark.parametrize("name", ["int4_token_group", "int8_dither", "int8_dither_w"])
def test_rounding_to_the_pools_dtype_is_no_part_of_the_error(name: str) -> None:
    """A pool narrower than the model: dithering the wider key would leave that rounding in no radius."""
    engine = Engine(name, torch.bfloat16, model_dtype=torch.float32)
    engine.step([7, 31], ForwardMode.EXTEND)
    for i, count in enumerate(engine.lens):
        slots = engine.requests.req_to_token[engine.rows[i], :count].long()
        k, _ = engine.stored(0, i, count)
        error = (k.double() - engine.exact[0]["k"][i, :count].double()).abs()
        for channel in range(D):
            q = torch.zeros(HQ, D, dtype=torch.float64)
            q[:, channel] = 1.0
            radius = engine.simulated.store[0].key_radius(q, slots, 1.0, 0.0)
            assert (error[:, :, channel].T.repeat_interleave(HQ // HKV, 0) <= radius).all()


def test_chunk_exact_reads_its_own_keys_exactly_and_leaves_quantized_ones() -> None:
    engine = Engine("int4_token_group")
    _, queries, outputs = engine.step([5, 9], ForwardMode.EXTEND)
    step, queries, outputs = engine.step([4, 3], ForwardMode.EXTEND)
    token = 0
    for i, (old, new) in enumerate(((5, 4), (9, 3))):
        for offset in range(new):
            k, v = engine.stored(1, i, old)
            exact_k, exact_v = (engine.exact[1][kind][i, old : old + offset + 1] for kind in "kv")
            out, _ = attention(queries[1][token], torch.cat([k, exact_k]), torch.cat([v, exact_v]))
            assert torch.allclose(outputs[1][token].double(), out, atol=1e-4)
            token += 1
        k, _ = engine.stored(1, i, old + new)
        assert (k[old:] != engine.exact[1]["k"][i, old : old + new]).any(-1).all()
    assert [(row.request, row.position) for row in step.rows] == [(0, p) for p in range(5, 9)] + [
        (1, p) for p in range(9, 12)
    ]
    assert all((audit_of(cells) <= cells.meter).all() for cells in step.layers.values())


def test_first_chunk_reads_no_quantized_key() -> None:
    step, _, _ = Engine("int4_token_group").step([5, 9], ForwardMode.EXTEND)
    assert step.rows == []
    assert not step.unmetered


def test_stored_prefill_reads_quantized_keys_of_its_own_chunk() -> None:
    engine = Engine("int4_token_group", prefill_reads="stored")
    step, queries, outputs = engine.step([5, 9], ForwardMode.EXTEND)
    token = 0
    for i, new in enumerate((5, 9)):
        for offset in range(new):
            k, v = engine.stored(0, i, offset + 1)
            out, _ = attention(queries[0][token], k, v)
            assert torch.allclose(outputs[0][token].double(), out, atol=1e-4)
            token += 1
    assert len(step.rows) == 14
    assert (step.layers[0].meter[1:] > 0.01).any()


def test_decode_rows_inside_a_mixed_chunk_are_metered() -> None:
    engine = Engine("int4_token_group")
    engine.step([6, 9], ForwardMode.EXTEND)
    step, queries, _ = engine.step([1, 12], ForwardMode.MIXED)
    assert step.rows[0].request == 0
    assert step.rows[0].position == 6
    k, _ = engine.stored(0, 0, 6)
    exact = engine.exact[0]["k"][0, :7]
    read = torch.cat([k, exact[6:]])
    _, compressed = attention(queries[0][0], read, read)
    _, true = attention(queries[0][0], exact, exact)
    tv = (true - compressed).abs().sum(-1) / 2
    assert (tv <= step.layers[0].meter[0]).all()
    assert (tv > 0).all()


def test_a_reused_slot_forgets_its_former_token() -> None:
    engine = Engine("fp8_e4m3_cast")
    engine.step([5, 9], ForwardMode.EXTEND)
    witness = engine.simulated.store[0].witness
    assert witness is not None
    before = witness.clone()
    engine.lens = [0, 0]
    engine.step([5, 9], ForwardMode.EXTEND)
    slots = engine.requests.req_to_token[engine.rows[0], :5].long()
    witness = engine.simulated.store[0].witness
    assert witness is not None
    assert not torch.equal(witness[slots], before[slots])
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    assert (audit_of(step.layers[0]) <= step.layers[0].meter).all()


def test_a_slot_written_behind_the_meter_is_unknown() -> None:
    engine = Engine("int8_token_group")
    engine.step([5, 9], ForwardMode.EXTEND)
    stranger = engine.requests.req_to_token[engine.rows[0], 2:3].long()
    engine.simulated.store.mark_unknown(0, stranger)
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    assert (step.layers[0].meter[0] == 1).all()
    assert (step.layers[0].meter[1] < 1).all()
    assert (step.layers[1].meter[0] < 1).all()


def test_unquantized_layers_are_exact_and_metered_ones_chosen() -> None:
    engine = Engine("int4_token_group", quantized_layers=[1], meter={"layers": [0]})
    engine.step([5, 9], ForwardMode.EXTEND)
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    assert set(step.layers) == {0}
    assert (step.layers[0].meter < 1e-3).all()


@pytest.mark.parametrize("name", ["int8_dither", "int8_dither_w"])
def test_dithered_layer_left_exact(name: str) -> None:
    engine = Engine(name, quantized_layers=[1])
    engine.step([5, 9], ForwardMode.EXTEND)
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    assert (step.layers[0].meter < 1e-3).all()
    assert (step.layers[1].meter > 1e-3).any()


def test_a_fused_write_is_refused() -> None:
    engine = Engine("int8_token_group")
    attend = engine.backend.forward

    def without_saving(q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, *_args: Any, **_kw: Any) -> Tensor:
        out: Tensor = attend(q, k, v, layer, batch, save_kv_cache=False)
        return out

    engine.backend.forward = without_saving
    with pytest.raises(UnsupportedError, match="fused write"):
        engine.step([5, 9], ForwardMode.EXTEND)


def test_attention_past_the_meter_is_refused() -> None:
    engine = Engine("int8_token_group")
    engine.layers = engine.layers[:1]
    with pytest.raises(UnsupportedError, match="bypasses the meter"):
        engine.step([5, 9], ForwardMode.EXTEND)


def test_stride_counts_rows_of_each_request() -> None:
    engine = Engine("int8_token_group", meter={"stride": 3})
    engine.step([5, 9], ForwardMode.EXTEND)
    metered_rows = []
    for _ in range(7):
        step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
        metered_rows.append(len(step.rows))
        assert len(step.rows) + sum(step.unmetered.values()) == 2
    assert metered_rows == [2, 0, 0, 2, 0, 0, 2]


def test_rows_the_engine_moves_keep_what_is_known() -> None:
    """SGLang copies rows of its pool in some paths; a witness left behind would belong to another token."""
    engine = gated("int4_token_group", kind="risk_ranked", risk_tau=1e9)
    engine.step([9, 14], ForwardMode.EXTEND)
    old = engine.requests.req_to_token[engine.rows[1], 2:7].long()
    new = engine.requests.req_to_token[engine.rows[0], 40:45].long()
    engine.pool.use_native_move_kv_cache = True
    engine.pool.move_kv_cache(new, old)
    engine.runtime.moved(new, old)
    engine.requests.req_to_token[engine.rows[1], 2:7] = new.int()
    step, queries, _ = engine.step([1, 1], ForwardMode.DECODE)
    for layer in range(LAYERS):
        _, compressed = attention(queries[layer][1], *engine.stored(layer, 1, 15))
        _, exact = attention(queries[layer][1], engine.exact[layer]["k"][1, :15], engine.exact[layer]["v"][1, :15])
        assert ((exact - compressed).abs().sum(-1) / 2 <= step.layers[layer].meter[1]).all()
        assert (step.layers[layer].meter[1] < 1).all()
    (copies,) = engine.simulated.accounts.copies
    assert not copies.has(new).any()


def test_rows_restored_from_elsewhere_are_unknown() -> None:
    engine = Engine("int8_token_group")
    engine.step([9, 14], ForwardMode.EXTEND)
    engine.runtime.overwritten(engine.requests.req_to_token[engine.rows[0], :3].long())
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    assert (step.layers[0].meter[0] == 1).all()
    assert (step.layers[0].meter[1] < 1).all()


@pytest.mark.parametrize("prefill_reads", ["chunk_exact", "stored"])
def test_a_prompts_last_token_alone_is_no_generated_one(prefill_reads: str) -> None:
    """A prompt that was served before leaves one token to compute; the stride of the generated ones starts after it."""
    engine = Engine("int8_token_group", meter={"stride": 2}, prefill_reads=prefill_reads)
    engine.step([20, 21], ForwardMode.EXTEND)
    rows = [engine.step([1, 1], ForwardMode.EXTEND)[0].rows]
    rows += [engine.step([1, 1], ForwardMode.DECODE)[0].rows for _ in range(3)]
    assert [[row.request for row in step] for step in rows] == [[0, 1], [0, 1], [], [0, 1]]


def test_the_banner_has_a_line_for_what_an_engine_has_to_say() -> None:
    """vLLM on a GPU: that no kernel is reached there."""
    runtime = Engine("fp8_e4m3_cast").runtime
    said = banner_text(runtime, answers="answers", metrics="/metrics", note="no kernel is reached").splitlines()
    assert "  note                : no kernel is reached" in said
    assert not any("note  " in line for line in banner_text(runtime, answers="a", metrics="m").splitlines())
