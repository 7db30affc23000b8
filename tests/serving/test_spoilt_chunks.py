"""A token of a chunk that is no number: the rows before it, which do not see it, are served and bounded as if alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from layer_pool import LayerPool
from torch import Tensor

from witcert_core.cache.bands import band_map
from witcert_core.cache.exact_copies import ExactCopies
from witcert_core.cache.witness_store import WitnessStore
from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.measure import bound_cells
from witcert_core.meter.tv import attention_logits
from witcert_core.policy.gates import Certified
from witcert_core.policy.plugins import quantizer_registry
from witcert_core.quantizers.rotary import RotarySpec
from witcert_core.serving.storage.gated_rows import LayerCall, RequestRows
from witcert_core.serving.storage.gathered import Gathered, PlacedRadii
from witcert_core.serving.storage.packed import attend
from witcert_core.serving.storage.repair import BlockRepairer

S, R, HQ, HKV, D, LAYER, SPOILT = 12, 5, 4, 2, 32, 0, 9
SCALE = D**-0.5


def tokens(spoilt: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [R, HQ, D] of the last positions, keys and values [S, HKV, D] with a number too few at SPOILT."""
    gen = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(n, h, D, generator=gen) for n, h in ((R, HQ), (S, HKV), (S, HKV)))
    for part in spoilt:
        (k if part == "k" else v)[SPOILT, :, 3] = math.nan
    return q, k, v


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = attention_logits(q, k, SCALE).softmax(-1).reshape(HKV, HQ // HKV, -1)
    return torch.einsum("kgs,skd->kgd", weights, v).flatten(0, 1)


@pytest.mark.parametrize("spoilt", ["k", "v", "kv", ""])
def test_packed_attention(spoilt: str) -> None:
    q, k, v = tokens(spoilt)
    side = WitnessStore(
        quantizer=quantizer_registry().get("int8_token_group"),
        layers=[LAYER],
        num_slots=S,
        num_kv_heads=HKV,
        head_dim=D,
        v_head_dim=D,
        bands=band_map(RotarySpec(D)),
        storage_dtype=torch.float32,
    )
    out = torch.empty_like(q)
    attend(q, Gathered(k, v, PlacedRadii(side[LAYER], torch.arange(S)), [0, S]), [R], SCALE, [0], out)
    for row in range(R):
        end = S - R + row + 1
        alone = attention(q[row], k[:end], v[:end])
        torch.testing.assert_close(out[row], alone, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert bool(out[row].isnan().any()) == (bool(spoilt) and end > SPOILT)


@pytest.mark.parametrize("spoilt", ["k", "v", "kv", ""])
def test_repaired_rows(spoilt: str) -> None:
    """Blocks before the spoilt token are restored, and the rows that read them computed again."""
    q, exact_k, exact_v = tokens(spoilt)
    pool, slots = LayerPool(exact_k + 0.3, exact_v - 0.2), torch.arange(S)
    pool.k[: S // 2] -= 0.6
    quantizer, bands = quantizer_registry().get("int8_token_group"), band_map(RotarySpec(D))
    sizes: dict[str, Any] = {"num_kv_heads": HKV, "head_dim": D, "v_head_dim": D}
    store = WitnessStore(
        quantizer=quantizer, layers=[LAYER], num_slots=S, bands=bands, storage_dtype=torch.float32, **sizes
    )
    stored: dict[str, Any] = {"stored_k": pool.k.clone(), "stored_v": pool.v.clone()}
    store.write(LAYER, slots, exact_k=exact_k, exact_v=exact_v, **stored)
    copies = ExactCopies(layers=[LAYER], num_slots=S, num_copies=S, dtype=torch.float32, **sizes)
    copies.claim(slots)
    copies.put(LAYER, slots, exact_k, exact_v)
    repairer = BlockRepairer(Certified("tv", tau=0.01), store, copies, block_size=2, max_pagein_bytes=None)
    positions = torch.arange(S - R, S)
    rows = RequestRows("a", q, positions, slots, 0.0, torch.zeros(R, dtype=torch.bool))
    (outcome,) = repairer.run(LayerCall(LAYER, pool, AttentionSpec(SCALE)), [rows])
    (cells,) = bound_cells([outcome.cells])
    assert sorted(outcome.outputs) == list(range(HKV))
    for row in range(R):
        end = S - R + row + 1
        seen = bool(spoilt) and end > SPOILT
        served = torch.cat([outcome.outputs[head][row] for head in range(HKV)])
        alone = attention(q[row], pool.k[:end], pool.v[:end])
        assert torch.equal(served.isfinite(), alone.isfinite())
        torch.testing.assert_close(served, alone, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert bool((cells.meter[row] == 1.0).all()) == (seen and "k" in spoilt)
        if seen:
            assert bool(cells.out_bound[row].isinf().all())
