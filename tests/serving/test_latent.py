"""Caches of latents (multi-head latent attention): one row a token, values a part of it, one error for both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from latent_engine import HEADS, LATENT, LAYER, ROPE, SPEC, WIDTH, LatentEngine, attention
from torch import Tensor

from witcert_core.cache.bands import band_map
from witcert_core.cache.capacity import side_bytes_per_head, side_bytes_per_token
from witcert_core.errors import InputError, QuantizerError, UnsupportedError
from witcert_core.quantizers import REGISTRY
from witcert_core.quantizers.base import CalibratedQuantizer, Quantizer
from witcert_core.quantizers.conformance import check_quantizer
from witcert_core.quantizers.rotary import RotarySpec

BUILT_IN = ("int8_token_group", "int4_token_group", "fp8_e4m3_cast", "int8_dither", "int8_dither_w")


@dataclass(frozen=True)
class ExactRope(Quantizer):
    """Integers for the latent; rotated channels stay as they are. It counts what it is given."""

    name = "test_exact_rope"
    given = []  # type: ignore[var-annotated] # noqa: RUF012 - of the class, on purpose

    def fake_quantize(self, x: Tensor, *, kind: Any, layer: int, positions: Tensor, ctx: Any) -> Tensor:
        self.given.append((kind, tuple(x.shape)))
        made = x.clone()
        latent = ctx.rotary.parts["latent"]
        made[..., latent] = (x[..., latent] * 4).round() / 4
        return made


@dataclass(frozen=True)
class Grouped(CalibratedQuantizer):
    """Four tokens together, on a scale that the first eight set."""

    name = "test_grouped_latents"
    token_group = 4
    calibration_tokens: int = 8

    def calibrate(self, x: Tensor, *, kind: Any, layer: int, positions: Tensor, ctx: Any) -> Tensor:
        return x.abs().amax((0, 2))[:, None].nan_to_num(1.0, 1.0).clamp(min=1e-6)

    def fake_quantize(self, x: Tensor, *, kind: Any, layer: int, positions: Tensor, ctx: Any) -> Tensor:
        step: Tensor = ctx.state / 31
        return (x / step).round().clamp(-31, 31) * step


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests register is forgotten after each: other tests look at every quantizer there is."""
    monkeypatch.setattr(REGISTRY, "_classes", dict(REGISTRY._classes))
    REGISTRY.register(ExactRope)
    REGISTRY.register(Grouped)


def held(engine: LatentEngine, decoded: int = 12) -> int:
    """Decode rows after a chunk of 20: every bound against float64. How many cells were measured."""
    engine.step(20)
    cells = 0
    for _ in range(decoded):
        step, _ = engine.step(1)
        for layers in (step.layers, step.deterministic_layers):
            if LAYER not in layers:
                continue
            tv, out = engine.truth(engine.length - 1)
            found = layers[LAYER]
            assert bool((tv <= found.meter[0]).all())
            assert bool((out <= found.out_bound[0]).all())
            assert bool(found.out_bound.isfinite().all())
            assert found.excess is None or bool((found.excess <= 0).all())
            cells += int((found.num_quantized > 0).sum())
    return cells


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BUILT_IN)
def test_bounds_hold_in_float64(name: str, dtype: torch.dtype) -> None:
    engine = LatentEngine(name, dtype)
    assert engine.runtime.groups[0].cache.kernels.startswith("plain torch: ")
    assert held(engine) >= 12 * HEADS
    assert not torch.equal(engine.pool.rows[engine.slots[:20]], engine.exact[:20])


def test_tokens_together_and_calibrated() -> None:
    assert held(LatentEngine("test_grouped_latents")) == 12 * HEADS


def test_a_row_is_quantized_once_and_its_parts_are_told() -> None:
    ExactRope.given.clear()
    engine = LatentEngine("test_exact_rope")
    assert held(engine, 2) == 2 * HEADS
    assert ExactRope.given == [("k", (20, 1, WIDTH)), ("k", (1, 1, WIDTH)), ("k", (1, 1, WIDTH))]
    stored, exact = engine.pool.rows[engine.slots[:22], 0], engine.exact[:22, 0]
    assert torch.equal(stored[:, LATENT:], exact[:, LATENT:])
    assert not torch.equal(stored[:, :LATENT], exact[:, :LATENT])


def test_the_witness_of_a_key_bounds_its_value_too() -> None:
    """What is kept of values is of the same error: no further than the latent bands of the key say."""
    engine = LatentEngine("int4_token_group")
    engine.step(20)
    side = engine.runtime.groups[0].cache.storage.store[LAYER]  # type: ignore[attr-defined]
    slots = engine.slots[:20]
    stored, exact = engine.pool.rows[slots, 0].double(), engine.exact[:20, 0].double()
    error = (stored - exact)[:, :LATENT].norm(dim=-1)
    assert bool((side.value_radius(slots)[:, 0] >= error).all())
    assert bool((side.value_radius(slots)[:, 0] <= error * 1.2).all())


def test_rows_of_a_prompt_that_was_multiplied_out_are_unknown() -> None:
    engine = LatentEngine("int8_token_group")
    first, _ = engine.step(20, absorbed=False)
    assert (first.rows, first.unmetered) == ([], {})  # it reads nothing quantized
    second, _ = engine.step(5, absorbed=False)
    assert second.rows == []
    assert second.unmetered == {(0, "decompressed"): 5}
    third, _ = engine.step(5)
    assert [row.position for row in third.rows] == [26, 27, 28, 29]


def test_sketches_of_latents() -> None:
    engine = LatentEngine("int4_token_group", meter={"sketch_bits": 4})
    plain = LatentEngine("int4_token_group")
    assert held(engine) == held(plain) == 12 * HEADS
    sketched, without = (x.step(1)[0].layers[LAYER].meter.mean() for x in (engine, plain))
    assert float(sketched) < float(without)


def test_samples_know_the_truth_of_latents() -> None:
    engine = LatentEngine("int4_token_group", meter={"audit_every": 0, "audit_share": 1.0, "sketch_share": 1.0})
    engine.step(20)
    for _ in range(3):
        step, _ = engine.step(1)
        tv, out = engine.truth(engine.length - 1)
        torch.testing.assert_close(step.truths[LAYER].tv[0], tv, atol=1e-5, rtol=0.0)
        torch.testing.assert_close(step.truths[LAYER].out[0], out, atol=1e-4, rtol=0.0)
        assert bool((tv <= step.sketched[LAYER].tv[0]).all())


def test_a_gate_restores_rows_whole() -> None:
    gate = {"kind": "certified", "tau": 0.02, "tau_out": 0.05, "block_size": 4}
    engine = LatentEngine("int4_token_group", gate=gate)
    engine.step(20)
    for _ in range(4):
        step, out = engine.step(1)
        tv, error = engine.truth(engine.length - 1)
        cells = step.layers[LAYER]
        assert bool((tv <= cells.meter[0]).all())
        assert bool((error <= cells.out_bound[0]).all())
        slots = engine.slots[: engine.length]
        served, _ = attention(engine.queries[engine.length - 1], engine.pool.rows[slots, 0])
        torch.testing.assert_close(out[0].double(), served, rtol=1e-5, atol=1e-5)  # over what was restored
    exact = (engine.pool.rows[slots] == engine.exact[: engine.length]).flatten(1).all(1)
    assert step.verdicts
    assert int(exact.sum()) >= 16


@pytest.mark.parametrize("absorbed", [True, False])
@pytest.mark.parametrize("sections", [{}, {"gate": {"kind": "certified", "tau": 0.01, "block_size": 4}}], ids=str)
def test_packed_rows(sections: dict[str, Any], absorbed: bool) -> None:
    """Codes of whole rows, attended by the meter; a chunk that was multiplied out is written all the same."""
    engine = LatentEngine("int8_dither", torch.bfloat16, storage="packed", **sections)
    engine.step(20, absorbed)
    for _ in range(6):
        step, out = engine.step(1)
        tv, error = engine.truth(engine.length - 1)
        for layers in (step.layers, step.deterministic_layers):
            cells = layers[LAYER]
            assert bool((tv <= cells.meter[0]).all())
            assert bool((error <= cells.out_bound[0]).all())
            assert cells.excess is None or bool((cells.excess <= 0).all())
        assert out.numel() == HEADS * LATENT
        assert bool(sections) == bool(step.verdicts)
        assert bool(sections) or bool((step.layers[LAYER].num_quantized > 0).all())
    assert engine.runtime.status()["bytes_packed_pool"] == len(engine.slots) * (WIDTH + 2 * 3)
    if not sections:
        off = engine.stored(engine.slots[:26]).double() - engine.exact[:26, 0].double()
        assert 0 < float(off.abs().max()) < 0.1


def test_bands_do_not_straddle_the_parts() -> None:
    published = RotarySpec(576, rotary_dim=64, latent_dim=512)
    for wanted, count in ((16, 18), (32, 36)):
        bands = band_map(published, wanted)
        assert bands.num_bands == count
        assert set(bands.channel_band[:512].tolist()).isdisjoint(bands.channel_band[512:].tolist())
        assert bands.channel_band.bincount().unique().tolist() == [576 // count]
    assert [x.tolist() for x in published.pair_channels()[[0, -1]]] == [[512, 544], [543, 575]]
    with pytest.raises(InputError, match="latent_dim is 512 beside 32 rotated"):
        RotarySpec(576, rotary_dim=32, latent_dim=512)


@pytest.mark.parametrize("name", BUILT_IN)
def test_bytes_beside_a_token_are_those_that_capacity_counts(name: str) -> None:
    engine = LatentEngine(name, torch.bfloat16)
    per_head = side_bytes_per_head(REGISTRY.get(name), SPEC, LATENT, 2)
    (group,) = engine.runtime.groups
    found = group.cache.storage.bytes_side + group.pass_ids.nbytes
    assert found == len(engine.slots) * side_bytes_per_token(per_head, 1, 1)


def test_keys_before_rope_are_refused() -> None:
    @dataclass(frozen=True)
    class BeforeRope(Quantizer):
        name = "test_before_rope"
        space = "pre_rope"

        def fake_quantize(self, x: Tensor, *, kind: Any, layer: int, positions: Tensor, ctx: Any) -> Tensor:
            return x

    REGISTRY.register(BeforeRope)
    with pytest.raises(UnsupportedError, match="latent cache"):
        LatentEngine("test_before_rope")


def test_conformance_over_latents() -> None:
    check_quantizer(REGISTRY.get("int8_token_group"), 576, latent_dim=512)
    check_quantizer(ExactRope(), WIDTH, latent_dim=LATENT)
    with pytest.raises(QuantizerError, match="latent"):
        check_quantizer(ExactRope(), WIDTH)  # of keys of heads it does not know what to leave
    assert SPEC.parts == {"latent": slice(0, LATENT), "rope": slice(LATENT, LATENT + ROPE)}
