"""Grouped, calibrated and pre-RoPE quantizers in the serving runtime: when tokens are quantized; that bounds hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plugin_serving import LAYERS, MiniEngine, Served

from witcert_core.errors import UnsupportedError
from witcert_core.serving.calls import AttentionCall

QUANTIZERS: dict[str, dict[str, Any]] = {
    "kivi": {"residual": 32},
    "kvquant": {"calibration_tokens": 16, "bits": 3},
    "fp8_calibrated": {"calibration_tokens": 16},
    "skvq": {"bits": 4, "calibration_tokens": 16, "window": 4},
    "rotated": {"bits": 3},
    "nvfp4": {},
}


def engine_of(name: str, dtype: torch.dtype = torch.float32, params: dict[str, Any] | None = None, **rest: Any) -> Any:
    return MiniEngine(name, {**QUANTIZERS[name], **(params or {})}, dtype, **rest)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize(
    ("reads", "dtype"), [("chunk_exact", torch.float32), ("stored", torch.bfloat16)], ids=["fp32", "bf16-stored"]
)
def test_bounds_hold_while_tokens_are_closed(name: str, reads: str, dtype: torch.dtype) -> None:
    engine = engine_of(name, dtype, prefill_reads=reads, metered=True)
    a, b = Served(engine, 1), Served(engine, 2)
    for new in ({a: 14, b: 31}, {a: 1, b: 1}, {a: 25, b: 1}, {a: 1, b: 3}, {a: 1, b: 1}):
        step = engine.step(new)
        assert all((cells.tv_audit.nan_to_num(0) <= cells.meter).all() for cells in step.layers.values())
    assert len(engine.changed(a)) > 25
    assert len(engine.changed(b)) > 25
    meters = torch.cat([cells.meter.flatten() for cells in step.layers.values()])
    assert (meters > 0).all()
    assert meters.min() < 0.99  # a bound that is always 1 would hold as well


@pytest.mark.parametrize(
    ("name", "params", "closed"),
    [
        ("kivi", {}, {31: 0, 32: 32, 63: 32, 64: 64}),
        ("kivi", {"residual": 64}, {32: 0, 63: 0, 64: 32, 96: 64}),
        ("fp8_calibrated", {}, {15: 0, 16: 16, 17: 17, 40: 40}),
        ("kvquant", {"sink_tokens": 0}, {15: 0, 16: 16, 17: 17}),
        ("skvq", {"sink_tokens": 0}, {15: 0, 16: 12, 17: 13, 40: 36}),
        ("nvfp4", {}, {1: 1, 7: 7}),
    ],
)
def test_tokens_are_exact_until_they_are_due(name: str, params: dict[str, int], closed: dict[int, int]) -> None:
    engine = engine_of(name, params=params)
    a, b = Served(engine, 1), Served(engine, 2)
    for length, count in closed.items():
        engine.step({a: length - a.length})
        for layer in range(LAYERS):
            assert engine.changed(a, layer) == list(range(count))
            known = engine.runtime.groups[0].cache.storage.store[layer].is_exact(a.slots[:length])
            assert known.tolist() == [i >= count for i in range(length)]
    engine.step({b: 1})
    assert engine.changed(a) == list(range(count))


@pytest.mark.parametrize("name", ["kivi", "fp8_calibrated", "kvquant", "skvq"])
def test_however_a_prompt_is_cut_the_same_is_stored(name: str) -> None:
    caches = []
    for chunks in ([70], [13, 47, 10], [32, 7, 1, 1, 29], [31, 1, 32, 6]):
        engine = engine_of(name)
        request = Served(engine, 1)
        for chunk in chunks:
            engine.step({request: chunk})
        caches.append(engine.stored(request))
    assert all(torch.equal(x, y) for cache in caches[1:] for x, y in zip(cache, caches[0], strict=True))


@pytest.mark.parametrize("name", ["kivi", "fp8_calibrated", "kvquant", "skvq"])
def test_tokens_fed_in_together_are_stored_and_witnessed_bit_for_bit_as_one_by_one(name: str) -> None:
    """In far fewer passes, but for a sliding window, which closes a token in each."""
    found, passes = [], []
    for together in (False, True):
        engine = engine_of(name, prefill_reads="stored")
        request = Served(engine, 1)
        engine.step({request: 35})
        sizes = engine.runtime.groups[0].cache.storage.timing.pending.rule.passes(35, 100) if together else [1] * 100
        for size in sizes:
            engine.step({request: size})
        passes.append(len(sizes))
        own = request.slots[: request.length]
        side = [
            tensor[own]
            for layer in range(LAYERS)
            for tensor in engine.runtime.groups[0].cache.storage.store[layer].tensors()
        ]
        found.append(
            [
                *engine.stored(request, 0),
                *engine.stored(request, 1),
                engine.runtime.groups[0].cache.storage.timing.pending.quantized,
                *side,
            ]
        )
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert passes == [100, 100 if name == "skvq" else 4 if name == "kivi" else 1]


def test_a_batch_gives_what_each_request_alone_gives() -> None:
    for name in QUANTIZERS:
        together, alone = engine_of(name), engine_of(name)
        pairs = [[Served(engine, seed) for seed in (1, 2)] for engine in (together, alone)]
        together.step({pairs[0][0]: 40, pairs[0][1]: 33})
        together.step({pairs[0][0]: 1, pairs[0][1]: 1})
        for request, count in zip(pairs[1], (40, 33), strict=True):
            alone.step({request: count})
            alone.step({request: 1})
        for a, b in zip(*pairs, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(together.stored(a), alone.stored(b), strict=True)), name


def test_a_shared_tail_is_quantized_once_by_whoever_gets_there_first() -> None:
    engine = engine_of("kivi", params={"residual": 64})  # a group is closed once 32 newer tokens are there
    a = Served(engine, 1)
    engine.step({a: 33})
    b = Served(engine, 2, prefix_of=a, shared=32)
    engine.step({a: 1, b: 31})
    assert not engine.changed(a)
    assert not engine.changed(b)
    engine.step({a: 1, b: 1})  # b reaches 64; a, at 35, reads the same quantized tokens, metered as such
    assert engine.changed(a) == engine.changed(b) == list(range(32))
    closed = [engine.pool.read(layer, a.slots[:32]) for layer in range(LAYERS)]
    engine.step({a: 29, b: 1})  # and a reaches 64
    engine.step({a: 1, b: 1})
    for layer, (k, v) in enumerate(closed):
        assert torch.equal(engine.pool.read(layer, a.slots[:32])[0], k)
        assert torch.equal(engine.pool.read(layer, a.slots[:32])[1], v)


@pytest.mark.parametrize(("name", "shared"), [("kivi", 16), ("fp8_calibrated", 8), ("kvquant", 8)])
def test_requests_that_part_inside_a_group_are_refused(name: str, shared: int) -> None:
    engine = engine_of(name)
    a = Served(engine, 1)
    engine.step({a: 33})
    b = Served(engine, 2, prefix_of=a, shared=shared)
    with pytest.raises(UnsupportedError, match=r"share prefixes in units of|inside a group"):
        engine.step({b: 40})


def test_a_shared_prefix_is_calibrated_once_and_forgotten_with_its_slots() -> None:
    engine = engine_of("fp8_calibrated")
    a = Served(engine, 1)
    engine.step({a: 20})
    b = Served(engine, 2, prefix_of=a, shared=16)
    engine.step({a: 1, b: 4})
    assert engine.runtime.groups[0].cache.storage.timing.pending.num_states == 1
    assert engine.changed(b) == list(range(20))
    c = Served(engine, 3)
    c.slots[:30] = a.slots[:30]  # a and b are over, their slots used again
    engine.step({c: 10})
    assert engine.runtime.groups[0].cache.storage.timing.pending.num_states == 1
    assert not engine.changed(c)
    engine.step({c: 10})
    assert engine.runtime.groups[0].cache.storage.timing.pending.num_states == 1
    alone = engine_of("fp8_calibrated")
    same = Served(alone, 3)
    alone.step({same: 20})
    assert torch.equal(alone.stored(same)[0], engine.stored(c)[0])


@pytest.mark.parametrize("name", ["kivi", "fp8_calibrated", "kvquant"])
def test_a_gate_repairs_groups_for_good(name: str) -> None:
    """Blocks written back stay exact: a closed token is not quantized again, and bounds are met."""
    engine = engine_of(name, gate={"kind": "certified", "tau": 0.01, "tau_out": 0.01, "block_size": 8})
    a = Served(engine, 1)
    engine.step({a: 45})
    assert engine.changed(a)
    step = engine.step({a: 1})
    assert step.verdicts
    assert all((cells.meter <= 0.01).all() for cells in step.layers.values())
    before = engine.changed(a)
    assert len(before) < 44
    engine.step({a: 1})
    assert set(engine.changed(a)) <= {*before, 45, 46}


def test_what_is_overwritten_is_unknown_and_never_quantized() -> None:
    engine = engine_of("kivi")
    a = Served(engine, 1)
    engine.step({a: 30})
    engine.runtime.overwritten(a.slots[:30])
    with pytest.raises(UnsupportedError, match="quantized in part"):
        engine.step({a: 2})


def test_what_is_moved_stays_what_it_was() -> None:
    engine = engine_of("kivi")
    a = Served(engine, 1)
    engine.step({a: 40})
    target = engine.take(40)
    for layer in range(LAYERS):
        engine.pool.write(layer, target, *engine.pool.read(layer, a.slots[:40]))
    engine.runtime.moved(target, a.slots[:40])
    a.slots[:40] = target
    engine.step({a: 1})
    assert engine.changed(a) == list(range(32))
    engine.step({a: 23})
    assert engine.changed(a) == list(range(64))


def test_positions_that_are_not_places_are_refused_before_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("kvquant")
    request = Served(engine, 1)
    kept = AttentionCall.__init__

    def shifted(self: AttentionCall, *args: Any) -> None:
        first, second, third, fourth, fifth, sixth, *more = args
        kept(self, first, second, third, fourth, fifth, sixth + 1, *more)

    monkeypatch.setattr(AttentionCall, "__init__", shifted)
    with pytest.raises(UnsupportedError, match="not the tokens' places"):
        engine.step({request: 3})


def test_without_its_tables_a_pre_rope_quantizer_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="rotary embeddings of this engine and model are not known"):
        MiniEngine("kvquant", tables=None)
