"""Side tensors of the slots: outward, unknown by default, and never older than the slot's last write."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from witcert_core.cache.bands import band_map
from witcert_core.cache.layer_witness import EXACT_CODE
from witcert_core.cache.norm_codes import UNKNOWN_CODE
from witcert_core.cache.witness_store import WitnessStore
from witcert_core.meter.protocols import JointRadii
from witcert_core.policy.plugins import quantizer_registry
from witcert_core.quantizers.base import DitheredQuantizer, Encoded, Kind, QuantContext
from witcert_core.quantizers.dither import DitherKey
from witcert_core.quantizers.int8_dither import Int8Dither
from witcert_core.quantizers.rotary import RotarySpec

KINDS: tuple[Kind, Kind] = ("k", "v")
HKV, G, LAYER = 2, 3, 5
SCALE = 0.11
BUILT_IN = (
    "none",
    "fp8_e4m3_cast",
    "fp8_e5m2_cast",
    "int8_token_group",
    "int4_token_group",
    "int2_token_group",
    "int8_dither",
    "int8_dither_w",
)


def store(name: str, head_dim: int, dtype: torch.dtype, keep_exact: bool = False, sketch_bits: int = 0) -> WitnessStore:
    return WitnessStore(
        quantizer=quantizer_registry().get(name),
        layers=[LAYER],
        num_slots=40,
        num_kv_heads=HKV,
        head_dim=head_dim,
        v_head_dim=head_dim,
        bands=band_map(RotarySpec(head_dim)),
        storage_dtype=dtype,
        keep_exact=keep_exact,
        sketch_bits=sketch_bits,
    )


def written(
    name: str, head_dim: int, dtype: torch.dtype, seed: int = 0, sketch_bits: int = 0
) -> tuple[WitnessStore, Tensor, dict[str, Tensor]]:
    """A store with 20 tokens written into scattered slots, those slots, and exact and stored K and V."""
    gen = torch.Generator().manual_seed(seed)
    slots = torch.randperm(40, generator=gen)[:20]
    quantizer = quantizer_registry().get(name)
    context = QuantContext(
        head_ids=tuple(range(HKV)),
        head_dim=head_dim,
        rotary=RotarySpec(head_dim),
        storage_dtype=dtype,
        pass_ids=torch.full((20,), 7),
        dither_key=DitherKey(seed=1, nonce=seed, dp_rank=0),
    )
    tensors: dict[str, Tensor] = {}
    codes: dict[str, Encoded | None] = {"k": None, "v": None}
    for kind in ("k", "v"):
        exact = torch.randn(20, HKV, head_dim, generator=gen) * torch.logspace(-2, 2, 20)[:, None, None]
        exact = exact.to(dtype)
        given = exact.float()
        if isinstance(quantizer, DitheredQuantizer):
            encoded = quantizer.encode(given, kind=kind, layer=LAYER, positions=torch.arange(20), ctx=context)
            codes[kind], fake = encoded, encoded.values
        else:
            fake = quantizer.fake_quantize(given, kind=kind, layer=LAYER, positions=torch.arange(20), ctx=context)
        tensors[f"exact_{kind}"], tensors[f"stored_{kind}"] = exact, fake.to(dtype)
    side = store(name, head_dim, dtype, sketch_bits=sketch_bits)
    side.write(LAYER, slots, **tensors, encoded_k=codes["k"], encoded_v=codes["v"])
    return side, slots, tensors


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_radii_cover_the_true_errors(name: str, head_dim: int, dtype: torch.dtype) -> None:
    side, slots, t = written(name, head_dim, dtype)
    q = torch.randn(G * HKV, head_dim, dtype=torch.float64)
    error = (t["stored_k"].double() - t["exact_k"].double()).repeat_interleave(G, 1)
    moved = torch.einsum("hd,shd->hs", q, error).abs() * SCALE
    certain = side[LAYER].key_radius(q, slots, SCALE, 0.0)
    assert (moved <= certain).all()
    norms = (t["stored_v"].double() - t["exact_v"].double()).norm(dim=-1)
    assert (norms <= side[LAYER].value_radius(slots)).all()
    if name.startswith("int8_dither"):
        likely = side[LAYER].key_radius(q, slots, SCALE, 1e-4)
        assert (likely <= certain).all()
        assert (moved <= likely).all()  # fails with probability 1e-4 a head; the seeds are fixed
    if name == "none":
        assert not certain.any()


def test_radii_of_rows_side_by_side() -> None:
    side, slots, _ = written("int4_token_group", 64, torch.bfloat16)
    layer = side[LAYER]
    assert isinstance(layer, JointRadii)
    rows = torch.stack([slots[:9], slots[4:13], slots[1:10]], 1)
    q = torch.randn(3, G * HKV, 64, dtype=torch.float64)
    joint = layer.joint_key_radius(q.flatten(0, 1), rows, SCALE)
    alone = [layer.key_radius(q[r], rows[:, r], SCALE, 0.0) for r in range(3)]
    torch.testing.assert_close(joint, torch.cat(alone), rtol=1e-12, atol=0)


def test_a_stored_witness_tightens_the_deterministic_radius() -> None:
    q = torch.randn(G * HKV, 64, dtype=torch.float64)
    plain, slots, _ = written("int8_dither", 64, torch.float32)
    with_witness, _, _ = written("int8_dither_w", 64, torch.float32)
    ratio = with_witness[LAYER].key_radius(q, slots, SCALE, 0.0) / plain[LAYER].key_radius(q, slots, SCALE, 0.0)
    assert ratio.median() < 0.8


@pytest.mark.parametrize("name", ["int4_token_group", "int8_dither", "int8_dither_w"])
def test_unknown_until_written_and_again_when_said_so(name: str) -> None:
    side, slots, _ = written(name, 64, torch.bfloat16)
    never = torch.tensor([s for s in range(40) if s not in slots.tolist()])
    q = torch.zeros(G * HKV, 64, dtype=torch.float64)  # 0 * infinity must not become a small radius
    q[:, 0] = 1.0
    layer = side[LAYER]
    assert layer.key_radius(q, never, SCALE, 1e-3).isinf().all()
    assert layer.value_radius(never).isinf().all()
    assert layer.key_radius(q, slots, SCALE, 1e-3).isfinite().all()
    side.mark_unknown(LAYER, slots[:3])
    assert layer.key_radius(q, slots[:3], SCALE, 0.0).isinf().all()
    side.mark_exact(LAYER, slots[:3])
    assert not layer.key_radius(q, slots[:3], SCALE, 1e-3).any()
    assert not layer.value_radius(slots[:3]).any()
    assert (UNKNOWN_CODE, EXACT_CODE) == (255, 0)


@pytest.mark.parametrize("sketch_bits", [0, 4])
@pytest.mark.parametrize("name", ["int4_token_group", "int8_dither", "int8_dither_w"])
def test_exact_are_the_heads_in_which_nothing_differs_neither_keys_nor_values(name: str, sketch_bits: int) -> None:
    kept, slots, _ = written(name, 64, torch.bfloat16, sketch_bits=sketch_bits)
    side = kept[LAYER]
    assert not side.exact_heads(torch.arange(40)).any()  # quantized ones, and slots never written
    side.head(1).mark_exact(slots[:3])
    expected = torch.zeros(20, HKV, dtype=torch.bool)
    expected[:3, 1] = True
    assert torch.equal(side.exact_heads(slots), expected)
    side.value_witness[slots[0]] = 9
    expected[0] = False
    assert torch.equal(side.exact_heads(slots), expected)
    assert not side.is_exact(slots).any()
    side.mark_exact(slots[5:6])
    assert side.is_exact(slots).nonzero().tolist() == [[5]]


@pytest.mark.parametrize("name", ["int8_dither", "int8_dither_w"])
def test_a_dithered_layer_left_unquantized_is_exact_or_unknown(name: str) -> None:
    side, slots, t = written(name, 64, torch.float32)
    exact: dict[str, Any] = {"exact_k": t["exact_k"], "exact_v": t["exact_v"], "stored_v": t["exact_v"]}
    changed = t["exact_k"].clone()
    changed[0, 0, 0] += 1e-3
    side.write(LAYER, slots, **exact, stored_k=changed)
    radius = side[LAYER].key_radius(torch.ones(G * HKV, 64, dtype=torch.float64), slots, SCALE, 0.0)
    assert radius[:, 0].isinf().all()
    assert not radius[:, 1:].any()


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("spoilt", [1.0, math.inf], ids=["changed", "infinite"])
def test_an_unquantized_token_of_a_dithered_layer_is_exact_in_keys_and_values_or_unknown(
    kind: str, spoilt: float
) -> None:
    side, slots, t = written("int8_dither", 64, torch.float32)
    same: dict[str, Any] = {x: t["exact_" + x[-1]].clone() for x in t}
    same[f"stored_{kind}"][3, 1, 2] += spoilt
    if math.isinf(spoilt):  # stored as handed over, but no number
        same[f"exact_{kind}"] = same[f"stored_{kind}"]
    side.write(LAYER, slots, **same)
    radius, exact = side[LAYER].value_radius(slots), side[LAYER].is_exact(slots)
    assert radius[3].isinf().all()
    assert exact.tolist() == [place != 3 for place in range(20)]


def test_spoiled_keys_are_unknown() -> None:
    side, slots, t = written("int4_token_group", 64, torch.float32)
    t["stored_k"][0, 0, 3] = math.nan
    t["stored_k"][1, 1, 3] = math.inf
    given: dict[str, Any] = t
    side.write(LAYER, slots, **given)
    radius = side[LAYER].key_radius(torch.ones(G * HKV, 64, dtype=torch.float64), slots, SCALE, 0.0)
    assert radius[:G, 0].isinf().all()
    assert radius[G:, 1].isinf().all()
    assert radius[G:, 0].isfinite().all()


def test_exact_copies_and_bytes() -> None:
    side = store("int4_token_group", 64, torch.bfloat16, keep_exact=True)
    k, v = torch.randn(3, HKV, 64), torch.randn(3, HKV, 64)
    slots = torch.tensor([4, 1, 9])
    side.keep(LAYER, slots, k, v)
    assert torch.equal(side.exact_k[LAYER][slots], k.to(torch.bfloat16))
    assert side.nbytes == 40 * HKV * (16 + 1)
    assert side.exact_nbytes == 2 * 40 * HKV * 64 * 2
    assert store("int8_dither", 64, torch.float32).nbytes == 40 * HKV * (1 + 2 * 2)
    assert store("int8_dither_w", 64, torch.float32).nbytes == 40 * HKV * (1 + 2 * 2 + 2)
    assert LAYER in side
    assert 0 not in side


def liar(side: WitnessStore, slots: Tensor, t: dict[str, Tensor], factor: float) -> None:
    """Write codes whose declared scales are `factor` times too small for what they give back."""
    quantizer = Int8Dither()
    context = QuantContext(
        head_ids=tuple(range(HKV)),
        head_dim=64,
        rotary=RotarySpec(64),
        storage_dtype=torch.float32,
        pass_ids=torch.full((20,), 7),
        dither_key=DitherKey(seed=1, nonce=0, dp_rank=0),
    )
    coded = {
        kind: quantizer.encode(t[f"exact_{kind}"], kind=kind, layer=LAYER, positions=torch.arange(20), ctx=context)
        for kind in KINDS
    }
    small = {kind: Encoded(e.codes, (e.scales / factor).half(), e.values) for kind, e in coded.items()}
    stored = {f"stored_{kind}": e.values for kind, e in coded.items()}
    exact = {name: x for name, x in t.items() if name.startswith("exact")}
    side.write(LAYER, slots, **exact, **stored, encoded_k=small["k"], encoded_v=small["v"])


def test_scales_that_promise_too_much_leave_the_token_unknown() -> None:
    """The deterministic tier must not rest on what a plugin says about itself."""
    side, slots, t = written("int8_dither", 64, torch.float32)
    q = torch.ones(G * HKV, 64, dtype=torch.float64)
    liar(side, slots, t, 1.0)
    assert side[LAYER].key_radius(q, slots, SCALE, 0.0).isfinite().all()
    liar(side, slots, t, 16.0)
    assert side[LAYER].key_radius(q, slots, SCALE, 1e-3).isinf().all()
    # Of values what was stored is known, whatever the scales say, and nothing else is claimed.
    radius = side[LAYER].value_radius(slots)
    missed = (t["stored_v"].double() - t["exact_v"].double()).norm(dim=-1)
    assert (missed <= radius).all()
    assert (radius <= missed * 1.1).all()


@pytest.mark.parametrize("name", ["none", "int8_dither"])
def test_a_huge_channel_of_v_is_measured(name: str) -> None:
    """Once infinite from 2^12 on, where the codes of norms ended; no float16 scale reaches 2^24 either."""
    for exponent in (10, 17, 24, 60, 100):
        side = store(name, 64, torch.bfloat16)
        exact = torch.randn(4, HKV, 64, generator=torch.Generator().manual_seed(exponent))
        exact[..., 5] *= 2.0**exponent
        exact, slots = exact.bfloat16(), torch.arange(4)
        stored = exact.clone()
        stored[..., 5] = 0.0
        codes = torch.zeros(4, HKV, 64, dtype=torch.int8)
        said = Encoded(codes, torch.full((4, HKV, 2), math.inf, dtype=torch.float16), stored.float())
        coded = {"encoded_k": said, "encoded_v": said} if name == "int8_dither" else {}
        side.write(LAYER, slots, exact_k=exact, exact_v=exact, stored_k=stored, stored_v=stored, **coded)
        missed, radius = exact[..., 5].double().abs(), side[LAYER].value_radius(slots)
        assert (missed <= radius).all()
        assert radius.isfinite().all()
        of_keys = side[LAYER].key_radius(torch.ones(G * HKV, 64, dtype=torch.float64), slots, SCALE, 0.0)
        assert bool(of_keys.isfinite().all()) is (name == "none")
