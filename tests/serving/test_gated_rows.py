"""What a gate is shown of all heads and requests together is what each would be shown alone."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from layer_pool import LayerPool

from witcert_core.cache.bands import band_map
from witcert_core.cache.exact_copies import ExactCopies
from witcert_core.cache.witness_store import WitnessStore
from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.cells import Terms
from witcert_core.policy.gates import Certified, Gate, Observe
from witcert_core.policy.plugins import quantizer_registry
from witcert_core.quantizers.base import Kind, QuantContext
from witcert_core.quantizers.rotary import RotarySpec
from witcert_core.serving.storage.gated_rows import GatedRows, LayerCall, RequestRows
from witcert_core.serving.storage.repair import BlockRepairer, Outcome

KINDS: tuple[Kind, Kind] = ("k", "v")
LAYER, SLOTS, HKV, G, D, BLOCK = 0, 96, 3, 2, 32, 4
SCALE = D**-0.5
SIZES: dict[str, Any] = {"num_kv_heads": HKV, "head_dim": D, "v_head_dim": D}


class Cache:
    """Slots 0..79 quantized, 80..95 exact; the first 8 shared by two requests."""

    def __init__(self, name: str, sketch_bits: int, gate: Gate) -> None:
        torch.manual_seed(0)
        exact = [torch.randn(SLOTS, HKV, D) for _ in "kv"]
        quantizer, bands = quantizer_registry().get(name), band_map(RotarySpec(D))
        ctx = QuantContext(tuple(range(HKV)), D, RotarySpec(D), torch.float32)
        self.exact_k = exact[0]
        stored = [
            quantizer.fake_quantize(x.clone(), kind=kind, layer=LAYER, positions=torch.arange(SLOTS), ctx=ctx)
            for kind, x in zip(KINDS, exact, strict=True)
        ]
        for x, y in zip(stored, exact, strict=True):
            x[80:] = y[80:]
        self.store = WitnessStore(
            quantizer=quantizer,
            layers=[LAYER],
            num_slots=SLOTS,
            bands=bands,
            storage_dtype=torch.float32,
            sketch_bits=sketch_bits,
            **SIZES,
        )
        slots = torch.arange(SLOTS)
        self.store.write(LAYER, slots, exact_k=exact[0], exact_v=exact[1], stored_k=stored[0], stored_v=stored[1])
        copies = ExactCopies(layers=[LAYER], num_slots=SLOTS, num_copies=SLOTS, dtype=torch.float32, **SIZES)
        copies.claim(slots)
        copies.put(LAYER, slots, *exact)
        self.pool = LayerPool(*(x.clone() for x in stored))
        self.repairer = BlockRepairer(gate, self.store, copies, block_size=BLOCK, max_pagein_bytes=None)

    def run(self, requests: list[RequestRows], **options: Any) -> list[Outcome]:
        return self.repairer.run(LayerCall(LAYER, self.pool, AttentionSpec(SCALE, **options), self.exact_k), requests)


def requests_of(shared: bool) -> list[RequestRows]:
    """Lengths alike and not, one row and three; two of them share their first two blocks if asked to."""
    generator = torch.Generator().manual_seed(5)
    order = torch.randperm(80, generator=generator)
    made: list[RequestRows] = []
    for number, (length, rows) in enumerate(((17, 1), (19, 1), (9, 3), (20, 1))):
        slots = torch.cat([order[:length], torch.arange(80 + number, 81 + number)])
        order = order[length:]
        if shared and number == 3:
            slots[:8] = made[0].slots[:8]
        q = torch.randn(rows, HKV * G, D, generator=generator) * 2
        audited = torch.tensor([True] * rows)
        made.append(RequestRows(str(number), q, torch.arange(length + 1 - rows, length + 1), slots, 0.0, audited))
    return made


def same(mine: Outcome, theirs: Outcome) -> None:
    for field in fields(Terms):
        ours, other = (getattr(x.cells.terms, field.name) for x in (mine, theirs))
        torch.testing.assert_close(ours, other, rtol=1e-9, atol=1e-12)
    assert torch.equal(mine.status, theirs.status)
    assert (mine.repaired_blocks, mine.repaired_bytes, mine.gave_up) == (
        theirs.repaired_blocks,
        theirs.repaired_bytes,
        theirs.gave_up,
    )
    assert mine.outputs.keys() == theirs.outputs.keys()
    for head, output in mine.outputs.items():
        torch.testing.assert_close(output, theirs.outputs[head])
    ours, other = mine.cells.audit, theirs.cells.audit
    assert (ours is None) == (other is None)
    if ours is not None and other is not None:
        torch.testing.assert_close(ours.tv, other.tv)


@pytest.mark.parametrize("sketch_bits", [0, 4])
@pytest.mark.parametrize("options", [{}, {"window_left": 11}, {"sinks": torch.randn(HKV * G)}], ids=str)
@pytest.mark.parametrize("tau", [1e-6, 0.1, 1.0])
def test_together_and_alone_a_gate_restores_the_same(sketch_bits: int, options: dict[str, object], tau: float) -> None:
    gate = Certified("both", tau=tau, tau_out=tau)
    joint = Cache("int4_token_group", sketch_bits, gate)
    found = joint.run(requests_of(shared=False), **options)
    for number, rows in enumerate(requests_of(shared=False)):
        (alone,) = Cache("int4_token_group", sketch_bits, gate).run([rows], **options)
        same(found[number], alone)
    if tau < 1e-3:
        assert sum(outcome.repaired_blocks for outcome in found) > 20


@pytest.mark.parametrize("tau", [1e-6, 0.02])
def test_a_block_that_another_request_restored_is_looked_at_again(tau: float) -> None:
    """Both read it exactly then: cells and outputs are those of the cache as it is in the end, blocks counted once."""
    cache = Cache("int4_token_group", 0, Certified("both", tau=tau, tau_out=tau))
    rows = requests_of(shared=True)
    before = cache.pool.k.clone()
    found = cache.run(rows)
    changed = (cache.pool.k != before).flatten(2).any(2)
    assert sum(outcome.repaired_bytes for outcome in found) == int(changed.sum()) * 2 * D * 4
    observing = Cache("int4_token_group", 0, Observe())
    observing.pool, observing.store = cache.pool, cache.store
    observing.repairer.store = cache.store
    for mine, theirs in zip(found, observing.run(rows), strict=True):
        for field in fields(Terms):
            ours, other = (getattr(x.cells.terms, field.name) for x in (mine, theirs))
            torch.testing.assert_close(ours, other, rtol=1e-9, atol=1e-12)
        assert mine.cells.audit is not None
        assert theirs.cells.audit is not None
        torch.testing.assert_close(mine.cells.audit.tv, theirs.cells.audit.tv)
    for outcome, own in zip(found, rows, strict=True):
        stale = [bool(changed[own.slots, head].any()) for head in range(HKV)]
        assert sorted(outcome.outputs) == [head for head in range(HKV) if stale[head]]
    assert sum(outcome.repaired_blocks for outcome in found) > 5


@pytest.mark.parametrize("tau", [1.0, 0.05])
def test_a_look_serves_all_heads_and_requests_and_a_round_of_repairs_costs_one_more(
    tau: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[GatedRows] = []
    plain = GatedRows.look

    def look(self: GatedRows, *args: Any) -> Any:
        looks.append(self)
        return plain(self, *args)

    monkeypatch.setattr(GatedRows, "look", look)
    rows = [own for own in requests_of(shared=False) if len(own.q) == 1]
    found = Cache("int4_token_group", 4, Certified("tv", tau=tau)).run(rows)
    repaired = [outcome.repaired_blocks for outcome in found]
    assert (sum(repaired) == 0) == (tau == 1.0)
    most = max(-(-own.slots.numel() // BLOCK) for own in rows)
    assert len(looks) <= 1 + most
    assert tau == 1.0 or len(looks) < sum(repaired)
