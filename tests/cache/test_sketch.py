"""Residual sketches: any estimate is sound, a good one makes the bound tight, and its bytes are what is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from witcert_core.cache.bands import band_map, group_map
from witcert_core.cache.capacity import side_bytes_per_head
from witcert_core.cache.layer_witness import DitherSlots, SketchSlots
from witcert_core.cache.sketch import Sketch, decode_sketch, encode_sketch, sketch_bytes
from witcert_core.cache.witness_store import WitnessStore
from witcert_core.errors import InputError
from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.cells import CellBatch
from witcert_core.meter.measure import measure
from witcert_core.meter.tv import attention_logits, softmax_with_sink, total_variation
from witcert_core.policy.plugins import quantizer_registry
from witcert_core.quantizers.base import Kind, QuantContext
from witcert_core.quantizers.rotary import RotarySpec

KINDS: tuple[Kind, Kind] = ("k", "v")
HKV, G, D, TOKENS = 2, 2, 64, 48
SCALE = D**-0.5
BANDS = band_map(RotarySpec(D))


def make_store(name: str, bits: int, head_dim: int = D) -> WitnessStore:
    return WitnessStore(
        quantizer=quantizer_registry().get(name),
        layers=[0],
        num_slots=TOKENS + 2,
        num_kv_heads=HKV,
        head_dim=head_dim,
        v_head_dim=head_dim,
        bands=band_map(RotarySpec(head_dim)),
        storage_dtype=torch.float32,
        sketch_bits=bits,
    )


class Cache:
    """A pool of TOKENS written slots; outlier channels as large models have them."""

    def __init__(self, name: str, bits: int, seed: int = 0, outliers: float = 8.0) -> None:
        gen = torch.Generator().manual_seed(seed)
        loud = torch.where(torch.arange(D) % 29 == 3, outliers, 1.0)
        self.store = make_store(name, bits)
        context = QuantContext(head_ids=(0, 1), head_dim=D, rotary=RotarySpec(D), storage_dtype=torch.float32)
        quantizer = quantizer_registry().get(name)
        self.exact = {x: torch.randn(TOKENS, HKV, D, generator=gen) * (loud if x == "k" else 1.0) for x in KINDS}
        self.stored = {
            x: quantizer.fake_quantize(e.clone(), kind=x, layer=0, positions=torch.arange(TOKENS), ctx=context)
            for x, e in self.exact.items()
        }
        self.q = torch.randn(3, HKV * G, D, generator=gen) * 2
        self.write()

    def write(self) -> None:
        self.store.write(
            0,
            torch.arange(TOKENS),
            exact_k=self.exact["k"],
            exact_v=self.exact["v"],
            stored_k=self.stored["k"],
            stored_v=self.stored["v"],
        )

    def cells(self, form: str = "auto", **options: Any) -> CellBatch:
        rows = len(self.q)
        return measure(
            self.q,
            torch.cat([self.stored["k"], torch.zeros(2, HKV, D)]),
            torch.cat([self.stored["v"], torch.zeros(2, HKV, D)]),
            kv_indptr=torch.arange(rows + 1) * TOKENS,
            kv_indices=torch.arange(TOKENS).repeat(rows),
            radii=self.store[0],
            spec=AttentionSpec(SCALE, **options),
            delta_loc=[0.0] * rows,
            form=form,
        )

    def truth(self, cap: float = 0.0, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """True TV and output error [R, H]."""
        found, moved = [], []
        for q in self.q.double():
            weights = [
                softmax_with_sink(attention_logits(q, x["k"].double(), SCALE, cap), sinks)
                for x in (self.exact, self.stored)
            ]
            outs = [
                torch.einsum("kgs,skd->kgd", w[:, :TOKENS].reshape(HKV, G, -1), x["v"].double()).flatten(0, 1)
                for w, x in zip(weights, (self.exact, self.stored), strict=True)
            ]
            found.append(total_variation(*weights))
            moved.append((outs[0] - outs[1]).norm(dim=-1))
        return torch.stack(found), torch.stack(moved)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("head_dim", [1, 30, 64, 80])
def test_an_estimate_is_within_half_a_step(bits: int, head_dim: int) -> None:
    bands = group_map(head_dim, 5)
    residual = torch.randn(7, 3, head_dim, dtype=torch.float64) * torch.logspace(-3, 4, 7)[:, None, None]
    residual[3] = 0.0
    made = encode_sketch(residual, bands, bits)
    assert made.codes.shape[-1] + made.steps.shape[-1] == sketch_bytes(head_dim, bands.num_bands, bits)
    found = decode_sketch(made, bands, bits)
    peak = torch.zeros(7, 3, bands.num_bands, dtype=torch.float64)
    peak = peak.scatter_reduce(-1, bands.channel_band.expand(residual.shape), residual.abs(), "amax")
    below = peak < 2 ** (bits - 1) * 2.0**-23 * (1 + 1e-6)  # the smallest step: such a band has no estimate
    half_step = torch.where(below, peak, peak / 2**bits * 2 ** (1 / 6))
    allowed = half_step.gather(-1, bands.channel_band.expand(residual.shape))
    assert ((found - residual).abs() <= allowed * (1 + 1e-6)).all()
    assert (found[3] == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_has_no_estimate(value: float) -> None:
    residual = torch.ones(2, 1, 8)
    residual[0, 0, 3] = value
    found = decode_sketch(encode_sketch(residual, group_map(8, 4), 4), group_map(8, 4), 4)
    assert (found[0] == 0).all()
    assert torch.allclose(found[1], torch.ones(1, 8, dtype=torch.float64), rtol=0.13)


def test_other_widths_are_refused() -> None:
    with pytest.raises(InputError, match="3 bits a channel; allowed are 2, 4, 8"):
        encode_sketch(torch.ones(1, 1, 4), group_map(4, 4), 3)


def test_with_a_sketch_a_dithered_quantizer_keeps_the_error_it_made() -> None:
    assert isinstance(make_store("int8_dither", 0)[0], DitherSlots)
    assert isinstance(make_store("int8_dither", 4)[0], SketchSlots)


@pytest.mark.parametrize("bits", [0, 2, 4])
@pytest.mark.parametrize("name", ["fp8_e4m3_cast", "int4_token_group", "int2_token_group"])
@pytest.mark.parametrize("cap", [0.0, 30.0])
@pytest.mark.parametrize("sink", [False, True])
def test_the_bounds_hold(name: str, bits: int, cap: float, sink: bool) -> None:
    sinks = torch.linspace(-1, 3, HKV * G) if sink else None
    for seed in range(3):
        cache = Cache(name, bits, seed)
        for form in ("auto", "extremal", "jensen"):
            cells = cache.cells(logits_soft_cap=cap, sinks=sinks, form=form)
            tv, moved = cache.truth(cap, None if sinks is None else sinks.double())
            assert (tv <= cells.meter).all()
            assert (cells.floor <= tv).all()
            assert bits or not cells.floor.any()
            assert (moved <= cells.out_bound).all()
            served = cells.out_norm
            assert served.isfinite().all()


@pytest.mark.parametrize(("name", "kept"), [("int4_token_group", (0.6, 0.2)), ("int2_token_group", (1.0, 0.8))])
def test_more_bits_come_closer_to_the_truth(name: str, kept: tuple[float, float]) -> None:
    gaps = []
    for bits in (0, 2, 4, 8):
        cache = Cache(name, bits)
        gaps.append(float((cache.cells().meter - cache.truth()[0]).mean()))
    assert gaps[1] <= kept[0] * gaps[0]
    assert gaps[2] <= kept[1] * gaps[0]
    assert gaps[3] <= 0.06


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), bits=st.sampled_from([2, 4, 8]), outliers=st.sampled_from([1.0, 30.0, 1e4]))
def test_no_direction_of_the_rest_breaks_the_bound(seed: int, bits: int, outliers: float) -> None:
    """Exact keys anywhere in the ball the sketch and the witness leave, so also in the worst corner for the query."""
    cache = Cache("int4_token_group", bits, seed, outliers)
    estimate = cache.store[0].residuals(torch.arange(TOKENS))
    assert estimate is not None
    witness = cache.store[0].witness
    assert witness is not None
    norms = (witness[:TOKENS].double() - 160) / 8
    radius = torch.where(witness[:TOKENS] == 0, 0.0, torch.exp2(norms))
    sign = torch.where(torch.rand(TOKENS, 1, 1, generator=torch.Generator().manual_seed(seed)) < 0.5, -1.0, 1.0)
    for row in range(len(cache.q)):
        head = seed % (HKV * G)
        q = cache.q[row, head].double()
        along = q / BANDS.norms(q[None]).squeeze(0)[BANDS.channel_band].clamp(min=1e-30)
        worst = along * radius[:, head // G, BANDS.channel_band] * sign[:, 0]
        exact = cache.stored["k"][:, head // G].double() - estimate[0][:, head // G] - worst * (1 - 1e-6)
        p = torch.softmax(exact @ q * SCALE, -1)
        served = torch.softmax(cache.stored["k"][:, head // G].double() @ q * SCALE, -1)
        tv, cells = float((p - served).abs().sum() / 2), cache.cells()
        assert float(cells.floor[row, head]) <= tv <= float(cells.meter[row, head])


def test_certain_damage_is_told_from_a_loose_bound() -> None:
    cache = Cache("int2_token_group", 8)
    cells, (tv, _) = cache.cells(), cache.truth()
    assert (tv > 0.3).any()
    assert (cells.floor > 0.8 * tv - 0.02).all()
    assert (cells.meter - cells.floor < 0.4 * tv + 0.02).all()


def test_an_exact_slot_has_no_estimate_and_an_unknown_one_no_bound() -> None:
    cache = Cache("int2_token_group", 4)
    cache.store.mark_unknown(0, torch.tensor([5]))
    assert (cache.cells().meter == 1).all()
    assert (cache.cells().log_a == float("inf")).all()
    cache.stored = {x: e.clone() for x, e in cache.exact.items()}
    cache.store.mark_exact(0, torch.arange(TOKENS))
    assert cache.store[0].is_exact(torch.arange(TOKENS)).all()
    assert (cache.cells().meter < 1e-3).all()
    cache.write()
    assert cache.store[0].is_exact(torch.arange(TOKENS)).all()


def test_a_slot_that_moves_takes_its_sketch_along() -> None:
    cache = Cache("int4_token_group", 4)
    before = cache.store[0].residuals(torch.tensor([3]))
    cache.store.move(torch.tensor([TOKENS]), torch.tensor([3]))
    after = cache.store[0].residuals(torch.tensor([TOKENS]))
    assert before is not None
    assert after is not None
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    head = cache.store[0].head(1).residuals(torch.tensor([3]))
    assert head is not None
    assert torch.equal(head[0], before[0][:, 1:])


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(
    ("name", "bits"), [("fp8_e4m3_cast", 0), ("fp8_e4m3_cast", 2), ("fp8_e4m3_cast", 8), ("int8_dither_w", 0)]
)
def test_the_bytes_of_a_token_are_those_of_the_tensors(name: str, bits: int, head_dim: int) -> None:
    quantizer = quantizer_registry().get(name)
    per_head = side_bytes_per_head(quantizer, RotarySpec(head_dim), head_dim, 4, bits, bands=16)
    assert per_head * HKV * (TOKENS + 2) == make_store(name, bits, head_dim).nbytes


def test_sketches_of_the_same_residual_are_the_same() -> None:
    residual = torch.randn(4, 2, D)
    a, b = (encode_sketch(residual, BANDS, 4) for _ in range(2))
    assert torch.equal(a.codes, b.codes)
    assert isinstance(a, Sketch)
