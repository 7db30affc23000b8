"""SGLang's pools of pools: attention layers among recurrent ones, pass by pass, and what is refused of others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine import HKV, HQ, SCALE, SLOTS, D, Engine
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor
from witcert_sglang.backend import metered
from witcert_sglang.refusals.worker import check_pool
from witcert_sglang.selfcheck import forward_batch

from witcert_core.errors import UnsupportedError
from witcert_core.meter.attention import AttentionSpec
from witcert_core.policy.model import parse_policy


def windowed_pool(dtype: torch.dtype) -> Any:
    """Layer 0 has a window, layer 1 keeps everything."""
    pool = SWAKVPool(SLOTS, 40, 1, dtype, HKV, D, [0], [1], "cpu")
    pool.register_mapping(torch.zeros(SLOTS + 2, dtype=torch.int64))
    return pool


def hybrid_pool(dtype: torch.dtype) -> Any:
    """Layers 1 and 4 of five attend; of the states nothing is asked."""
    return HybridLinearKVPool(SLOTS, dtype, 1, HKV, D, [1, 4], "cpu", mamba_pool=None)


def attended(engine: Engine, layer: int, spec: AttentionSpec, request: int, row: int, q: Tensor) -> Tensor:
    """Weights [HQ, S] of a row over exact keys and over stored ones, in float64, side by side [2, HQ, S]."""
    places = spec.visible(torch.arange(row + 1))
    slots = engine.requests.req_to_token[engine.rows[request]][places].long()
    if engine.layers[layer].sliding_window_size >= 0:
        slots = engine.pool.translate_loc_from_full_to_swa(slots)
    stored = engine.pool.get_key_buffer(engine.layers[layer].layer_id)[slots]
    exact = engine.exact[layer]["k"][request, places]
    return torch.stack([spec.logits(q.double(), k.double()).softmax(-1) for k in (exact, stored)])


def test_attention_layers_with_gaps_between_them() -> None:
    engine = Engine("int4_token_group", make_pool=hybrid_pool)
    assert engine.runtime.layers == (1, 4)
    assert engine.runtime.without_cache == (0, 2, 3)
    engine.step([9, 4], ForwardMode.EXTEND)
    for _ in range(4):
        step, queries, _ = engine.step([1, 1], ForwardMode.DECODE)
        step.count(engine.runtime.ledger, {0, 1})
        for number, row in enumerate(step.rows):
            for place, layer in enumerate(engine.runtime.layers):
                q = queries[place][row.token]
                exact, stored = attended(engine, place, AttentionSpec(SCALE), row.request, row.position, q)
                assert (0.5 * (exact - stored).abs().sum(-1) <= step.layers[layer].meter[number]).all()
    found = engine.runtime.finish("a", "stop")
    assert sorted(found["layers_excluded"]) == ["0", "2", "3"]
    assert found["cells_measured"] + found["cells_exact"] == 4 * 2 * HQ
    assert found["audit"]["violations"] == found["audit"]["mismatches"] == 0


def test_pools_of_other_pools_are_refused() -> None:
    policy = parse_policy({"version": 1, "quantizer": {"name": "int8_dither"}})
    packed = parse_policy({"version": 1, "quantizer": {"name": "int8_dither", "storage": "packed"}})
    assert [sub.layers for sub in check_pool(windowed_pool(torch.float32), policy, torch.float32)] == [(1,), (0,)]
    assert [sub.layers for sub in check_pool(hybrid_pool(torch.float32), policy, torch.float32)] == [(1, 4)]
    for pool in (windowed_pool(torch.float32), hybrid_pool(torch.float32)):
        with pytest.raises(UnsupportedError, match=r"quantizer\.storage: packed in a"):
            check_pool(pool, packed, torch.float32)
        with pytest.raises(UnsupportedError, match=r"quantizer\.name: engine in a"):
            check_pool(pool, parse_policy({"version": 1, "quantizer": {"name": "engine"}}), torch.float32)

    class Other(MHATokenToKVPool):  # type: ignore[misc]
        pass

    pool = hybrid_pool(torch.float32)
    pool.full_kv_pool = Other(SLOTS, 1, torch.float32, HKV, D, 2, "cpu", False)
    with pytest.raises(UnsupportedError, match="the server uses Other"):
        check_pool(pool, policy, torch.float32)


def test_a_mask_of_an_images_tokens_is_refused() -> None:
    """As Gemma 3 and 4 hand one to the Triton backend, of prompts with images; drafts have one as well."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    kind: Any = metered(TritonAttnBackend)
    backend = kind.__new__(kind)
    backend.forward_metadata = SimpleNamespace(custom_mask=torch.ones(4, dtype=torch.bool))
    batch = forward_batch(0, 0, torch.arange(2), is_decode=False, device="cpu")
    q = torch.zeros(2, 8)
    with pytest.raises(UnsupportedError, match="layer 3 attends under a mask of its own"):
        backend.forward_extend(q, q, q, SimpleNamespace(layer_id=3), batch)
