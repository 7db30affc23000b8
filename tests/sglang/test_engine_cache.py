"""`quantizer: engine`: whatever SGLang's pool makes of keys and values is read back and bounded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from audits import audit_of
from conftest import Metered, ask_many, check_recorded, samples_of_each_task, write_policy
from engine import LAYERS, Engine
from layer_pool import attention
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import FP4MXBlock16KVCacheMethod, NVFP4KVCacheMethod
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor
from witcert_demo.servers import running_server
from witcert_sglang.pool import EnginePool, backend_scales
from witcert_sglang.refusals.server import ENGINE_ROWS, Server
from witcert_sglang.refusals.worker import FLASHINFER_ROWS, POOL_ROWS, FlashInfer, ServedPool

from witcert_core.errors import UnsupportedError
from witcert_core.policy.model import parse_policy
from witcert_core.serving.refusals import refuse

pytestmark = pytest.mark.sglang
POOLS: dict[str, Any] = {
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp4_mx_block16": FP4MXBlock16KVCacheMethod(),
}
"""Pools of SGLang's own; a CPU server accepts the first only, so the others stand here without one."""


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("model", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_the_pool_stores_is_bounded(pool: str, model: torch.dtype) -> None:
    if POOLS[pool] == model:
        pytest.skip("nothing is quantized")
    engine = Engine("engine", model, own_pool=POOLS[pool], prefill_reads="stored")
    engine.step([7, 31], ForwardMode.EXTEND)
    step, queries, outputs = engine.step([1, 1], ForwardMode.DECODE)
    damaged = 0.0
    for layer in range(LAYERS):
        cells = step.layers[layer]
        for i, count in enumerate(engine.lens):
            q = queries[layer][i].to(model).float()
            out, compressed = attention(q, *engine.stored(layer, i, count))
            exact_out, exact = attention(q, engine.exact[layer]["k"][i, :count], engine.exact[layer]["v"][i, :count])
            assert torch.allclose(outputs[layer][i].double(), out, atol=5e-2 if model == torch.bfloat16 else 1e-4)
            tv = (exact - compressed).abs().sum(-1) / 2
            damaged = max(damaged, float(tv.max()))
            assert (tv <= cells.meter[i]).all()
            assert (audit_of(cells)[i] <= cells.meter[i]).all()
            assert ((exact_out - out).norm(dim=-1) <= cells.out_bound[i]).all()
    assert damaged > (1e-4 if pool == "bf16" else 0.02)


def test_keys_written_as_one_format_and_read_as_another_are_not_certified() -> None:
    engine = Engine("engine", own_pool=torch.float8_e4m3fn, prefill_reads="stored")
    pool = engine.pool
    plain = pool.get_key_buffer
    pool.get_key_buffer = lambda layer: plain(layer).view(torch.uint8).view(torch.float8_e5m2)
    engine.step([7, 31], ForwardMode.EXTEND)
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    assert (step.layers[0].meter > 0.9).all()
    assert (audit_of(step.layers[0]) <= step.layers[0].meter).all()


def test_scales_of_a_layer_are_part_of_what_is_read() -> None:
    """Triton stores keys divided by the layer's scale and multiplies what it reads; both directions must agree."""
    pool = Engine("engine", own_pool=torch.float8_e4m3fn, prefill_reads="stored").pool
    layer = SimpleNamespace(layer_id=1, k_scale_float=4.0, v_scale_float=0.5)
    k, v = (torch.randn(3, 2, 64) * 100 for _ in range(2))
    slots = torch.tensor([5, 9, 2])
    pool.set_kv_buffer(layer, slots, k.clone(), v.clone(), 4.0, 0.5)
    scales = backend_scales([layer], "triton")
    read_k, read_v = EnginePool(pool, torch.bfloat16, scales).read(1, slots)
    assert scales == {1: (4.0, 0.5)}
    assert read_k.dtype == torch.float32
    assert torch.allclose(read_k, k, rtol=2.0**-3, atol=4 * 2.0**-9)
    assert torch.allclose(read_v, v.clamp(-224, 224), rtol=2.0**-3, atol=0.5 * 2.0**-9)
    wrong, _ = EnginePool(pool, torch.bfloat16, {}).read(1, slots)
    assert not torch.allclose(wrong.float(), k, rtol=0.5, atol=1.0)
    assert backend_scales([layer], "torch_native") == {}  # stores and reads without them
    with pytest.raises(UnsupportedError, match="one each"):
        backend_scales([SimpleNamespace(layer_id=0, k_scale_float=2.0, v_scale_float=None)], "triton")


def test_an_engines_scale_written_in_place_is_no_part_of_what_is_exact() -> None:
    """`set_kv_buffer` divides the keys it is handed in place; exact is what they were before."""
    engine = Engine("engine", own_pool=torch.float8_e4m3fn, prefill_reads="stored")
    plain = engine.pool.set_kv_buffer

    def scaled(layer: Any, loc: Tensor, k: Tensor, v: Tensor) -> None:
        plain(layer, loc, k, v, 2.0, 2.0)

    engine.pool.set_kv_buffer = scaled
    engine.step([7, 31], ForwardMode.EXTEND)
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    kept = engine.simulated.store.exact_k[0]
    slots = engine.requests.req_to_token[engine.rows[1], :31].long()
    assert torch.equal(kept[slots], engine.exact[0]["k"][1, :31])
    assert (step.layers[0].meter > 0.9).any()  # this backend reads without the scale, and so halves its keys


def test_a_chunk_that_reads_its_own_exact_keys() -> None:
    """As under Triton: the pool holds quantized keys, the chunk attends its exact ones, and is bounded as such.

    torch_native, which attends here, reads what it stored: the audit of outputs must find that the policy is wrong.
    """
    engine = Engine("engine", own_pool=torch.float8_e4m3fn)
    engine.checks_outputs = False
    engine.step([5, 9], ForwardMode.EXTEND)
    step, queries, _ = engine.step([4, 3], ForwardMode.EXTEND)
    token = 0
    for i, (old, new) in enumerate(((5, 4), (9, 3))):
        for offset in range(new):
            k, _ = engine.stored(1, i, old)
            exact = engine.exact[1]["k"][i, : old + offset + 1]
            read = torch.cat([k, exact[old:]])
            _, compressed = attention(queries[1][token], read, read)
            _, true = attention(queries[1][token], exact, exact)
            tv = (true - compressed).abs().sum(-1) / 2
            assert (tv <= step.layers[1].meter[token]).all()
            assert (audit_of(step.layers[1])[token] - tv).abs().max() < 1e-4
            token += 1
    assert engine.mismatches(step) > 0


def test_rows_the_engine_copies_are_unknown() -> None:
    engine = Engine("engine", own_pool=torch.float8_e4m3fn, prefill_reads="stored")
    engine.step([9, 14], ForwardMode.EXTEND)
    engine.runtime.moved(engine.requests.req_to_token[engine.rows[0], :3].long(), torch.tensor([1, 2, 3]))
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    assert (step.layers[0].meter[0] == 1).all()
    assert (step.layers[0].meter[1] < 1).any()


def test_refused_by_name() -> None:
    cpu: dict[str, Any] = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "kv_cache_dtype": "fp8_e4m3",
    }
    gpu = {"device": "cuda", "attention_backend": "flashinfer"}

    def check(reads: str, **options: object) -> None:
        policy = parse_policy({"version": 1, "quantizer": {"name": "engine"}, "prefill_reads": reads})
        refuse(ENGINE_ROWS, Server(SimpleNamespace(**{**cpu, **options}), policy))

    check("stored")
    check("chunk_exact", attention_backend="triton")
    for changes, reads, named in (
        ({}, "chunk_exact", "set prefill_reads to 'stored'"),
        ({"prefill_attention_backend": "triton"}, "stored", "set prefill_reads to 'chunk_exact'"),
        ({**gpu, "attention_backend": "fa3"}, "chunk_exact", "fa3.*use --attention-backend flashinfer"),
        ({**gpu, "decode_attention_backend": "triton"}, "chunk_exact", "triton.*use --attention-backend flashinfer"),
        ({**gpu, "kv_cache_dtype": "fp4_e2m1"}, "chunk_exact", "fp4_e2m1.*use fp8_e4m3 or fp8_e5m2"),
        (gpu, "stored", "set prefill_reads to 'chunk_exact'"),
    ):
        with pytest.raises(UnsupportedError, match=named):
            check(reads, **changes)
    check("chunk_exact", **gpu)
    plain = {"use_paged": False, "enable_deterministic": False, "is_multimodal": False}
    refuse(FLASHINFER_ROWS, FlashInfer(SimpleNamespace(**plain), {0: (1.0, 1.0)}))
    for odd, scales, named in (
        ({"use_paged": True}, {}, "SGLANG_FLASHINFER_USE_PAGED"),
        ({"enable_deterministic": True}, {}, "deterministic"),
        ({"is_multimodal": True}, {}, "multimodal"),
        ({}, {0: (1.0, 1.0), 3: (0.5, 1.0)}, "with scales"),
    ):
        with pytest.raises(UnsupportedError, match=named):
            refuse(FLASHINFER_ROWS, FlashInfer(SimpleNamespace(**{**plain, **odd}), scales))
    pool, engine = Engine("none").pool, parse_policy({"version": 1, "quantizer": {"name": "engine"}})
    with pytest.raises(UnsupportedError, match="nothing is quantized"):
        refuse(POOL_ROWS, ServedPool(pool, engine, torch.float32))
    refuse(POOL_ROWS, ServedPool(pool, engine, torch.bfloat16))
    pool.quant_method = NVFP4KVCacheMethod.__new__(NVFP4KVCacheMethod)
    with pytest.raises(UnsupportedError, match="nvfp4"):
        refuse(POOL_ROWS, ServedPool(pool, engine, torch.bfloat16))


def test_a_server_with_a_cache_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    """A bfloat16 pool under a float32 model: the one quantized cache that a CPU server accepts."""
    jsonl = tmp_path / "records.jsonl"
    policy = write_policy(
        tmp_path / "policy.yaml",
        quantizer={"name": "engine"},
        prefill_reads="stored",
        meter={"stride": 1, "audit_every": 1, "max_rows": 2},
        report={"jsonl": str(jsonl), "cells": "all"},
    )
    options = ["--dtype", "float32", "--kv-cache-dtype", "bf16", "--chunked-prefill-size", "128"]
    with running_server(checkpoint, policy=policy, log=tmp_path / "log", options=options) as server:
        check_recorded("engine, bf16", Metered(server, jsonl))
        asked = ask_many(server, samples_of_each_task(2, num_tokens=256))
        prompt = samples_of_each_task(1, num_tokens=256, seed=71)[0].prompt
        cold, warm = (Metered(server, tmp_path / "none").generate(prompt) for _ in range(2))
    assert all(a.right for a in asked)
    summaries = [a.summary for a in asked if a.summary is not None]
    assert sum(s["audit"]["violations"] + s["audit"]["mismatches"] for s in summaries) == 0
    assert sum(s["audit"]["cells"] for s in summaries) > 100
    assert 0 < max(s["audit"]["tv_max"] for s in summaries) < 0.2
    assert all(s["tv_certified_share"] > 0.9 and s["quantizer"] == "engine" for s in summaries)
    assert warm["meta_info"]["cached_tokens"] > 200
    assert warm["output_ids"] == cold["output_ids"]
    assert "engine in a bfloat16 pool" in server.log_text()
