"""Writes that wait: in the end a slot says what its last write, mark or move said, whenever it was accounted for."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from witcert_core.cache.bands import band_map
from witcert_core.cache.witness_store import WitnessStore
from witcert_core.cache.write_queue import MAX_WAITING, PIECE, SMALL
from witcert_core.policy.plugins import quantizer_registry
from witcert_core.quantizers.base import DitheredQuantizer, QuantContext
from witcert_core.quantizers.dither import DitherKey
from witcert_core.quantizers.rotary import RotarySpec

HKV, D, SLOTS, LAYER = 2, 64, 60, 3
SPEC = RotarySpec(D)


def store(name: str, sketch_bits: int = 0, slots: int = SLOTS) -> WitnessStore:
    return WitnessStore(
        quantizer=quantizer_registry().get(name),
        layers=[LAYER],
        num_slots=slots,
        num_kv_heads=HKV,
        head_dim=D,
        v_head_dim=D,
        bands=band_map(SPEC),
        storage_dtype=torch.float32,
        keep_exact=True,
        sketch_bits=sketch_bits,
    )


def tokens(name: str, count: int, seed: int) -> dict[str, Any]:
    """Exact and stored K and V of some tokens, with the codes of a dithered quantizer."""
    gen = torch.Generator().manual_seed(seed)
    quantizer = quantizer_registry().get(name)
    ctx = QuantContext(
        head_ids=(0, 1),
        head_dim=D,
        rotary=SPEC,
        storage_dtype=torch.float32,
        pass_ids=torch.full((count,), seed + 1),
        dither_key=DitherKey(seed=1, nonce=2, dp_rank=0),
    )
    made: dict[str, Any] = {}
    for kind in ("k", "v"):
        exact = torch.randn(count, HKV, D, generator=gen) * 3
        place: dict[str, Any] = {"kind": kind, "layer": LAYER, "positions": torch.arange(count), "ctx": ctx}
        made[f"exact_{kind}"] = exact
        if isinstance(quantizer, DitheredQuantizer):
            codes = quantizer.encode(exact, **place)
            made[f"encoded_{kind}"], made[f"stored_{kind}"] = codes, codes.values
        else:
            made[f"stored_{kind}"] = quantizer.fake_quantize(exact, **place)
    return made


def same(one: WitnessStore, other: WitnessStore) -> bool:
    sides = zip(one[LAYER].tensors(), other[LAYER].tensors(), strict=True)
    return all(torch.equal(a, b) for a, b in sides) and torch.equal(one.exact_k[LAYER], other.exact_k[LAYER])


@pytest.mark.parametrize(
    ("name", "sketch_bits"),
    [("int4_token_group", 0), ("int4_token_group", 4), ("int8_dither_w", 0), ("int8_dither", 4)],
)
@pytest.mark.parametrize("seed", range(6))
def test_waiting_changes_nothing(name: str, sketch_bits: int, seed: int) -> None:
    """Slots come round again, are marked and moved; the store that is asked after every step is the one in no doubt."""
    rng = random.Random(seed)
    lazy, asked = store(name, sketch_bits), store(name, sketch_bits)
    for step in range(60):
        count = rng.choice([1, 1, 1, 2, 4, SMALL + 1])
        slots = torch.tensor(rng.sample(range(SLOTS), count))
        action = rng.choice(["write"] * 6 + ["exact", "unknown", "move"])
        made = tokens(name, count, 100 * seed + step)
        for one in (lazy, asked):
            if action == "write":
                given: dict[str, Any] = {
                    key: value.clone() if isinstance(value, Tensor) else value for key, value in made.items()
                }
                one.write(LAYER, slots.clone(), **given)
                for value in given.values():  # an engine uses the memory again
                    if isinstance(value, Tensor):
                        value.fill_(1e3)
            elif action == "exact":
                one.mark_exact(LAYER, slots)
            elif action == "unknown":
                one.mark_unknown(LAYER, slots)
            else:
                one.move(slots.roll(1), slots)
        asked[LAYER]
        if rng.random() < 0.05:
            assert same(lazy, asked), step
    assert same(lazy, asked)


def test_few_tokens_wait_and_never_long() -> None:
    waiting = store("int4_token_group", slots=4 * MAX_WAITING)
    side = waiting._layers[LAYER]
    for number in range(3 * MAX_WAITING):
        waiting.write(LAYER, torch.tensor([number]), **tokens("int4_token_group", 1, number))
        unknown = (side.value_witness[: number + 1, 0] == 255).sum()
        assert unknown <= MAX_WAITING, "more than the limit lie in memory"
        if number == 5:
            assert unknown == 6, "a write that need not be accounted for yet was: this test is of nothing"
    assert (waiting[LAYER].value_witness[: 3 * MAX_WAITING] < 255).all()


def test_long_writes_are_accounted_for_in_pieces_alike() -> None:
    count = 3 * PIECE // (HKV * D) + 7
    made = tokens("int8_token_group", count, 1)
    whole = store("int8_token_group", slots=count)
    whole.write(LAYER, torch.randperm(count), **made)
    assert (whole[LAYER].value_witness < 255).all()
    radius = whole[LAYER].value_radius(torch.arange(count))
    assert radius.max() < 0.2 * made["exact_v"].norm(dim=-1).max()


def test_a_write_that_fails_leaves_its_slots_unknown() -> None:
    failing = store("int8_token_group")
    good = tokens("int8_token_group", 2, 0)
    failing.write(LAYER, torch.tensor([4, 5]), **good)
    assert (failing[LAYER].value_witness[4:6] < 255).all()
    bad = good | {"stored_k": torch.zeros(2, HKV, D - 1)}
    failing.write(LAYER, torch.tensor([5, 6]), **bad)
    with pytest.raises(ValueError, match="must agree"):
        failing[LAYER]
    assert (failing[LAYER].value_witness[5:7] == 255).all()
    assert (failing[LAYER].value_witness[4] < 255).all()


@pytest.mark.parametrize("later", [[4, 5], [4, 6], [8]], ids=["apart", "overlapping", "refused beside it"])
@pytest.mark.parametrize("then", ["ask", "write", "exact", "move"])
def test_writes_beside_one_that_fails_are_no_longer_what_they_were(later: list[int], then: str) -> None:
    """Slots 4 and 5 are known, then written again beside a write that cannot be accounted for."""
    failing = store("int8_token_group")
    failing.write(LAYER, torch.tensor([4, 5]), **tokens("int8_token_group", 2, 0))
    assert (failing[LAYER].value_witness[[4, 5]] < 255).all()
    bad = tokens("int8_token_group", 2, 1) | {"stored_k": torch.zeros(2, HKV, D - 1)}
    failing.write(LAYER, torch.tensor([6, 7]), **bad)
    failing.write(LAYER, torch.tensor(later), **tokens("int8_token_group", len(later), 2))
    more = tokens("int8_token_group", SMALL + 1, 3)
    long = torch.arange(20, 20 + SMALL + 1)
    last, attempt = {
        "ask": ([6, 7], lambda: failing[LAYER]),
        "write": ([6, 7, *long], lambda: failing.write(LAYER, long, **more)),
        "exact": ([6, 7, 9], lambda: failing.mark_exact(LAYER, torch.tensor([9]))),
        "move": ([6, 7, 8], lambda: failing.move(torch.tensor([8]), torch.tensor([5]))),
    }[then]
    with pytest.raises((ValueError, RuntimeError)):
        attempt()  # type: ignore[no-untyped-call]
    unknown = (failing[LAYER].value_witness == 255).all(1)
    assert unknown[[*last, *later]].all(), "what a slot said before is of another token"
