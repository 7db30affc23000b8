"""When the choice of outlier channels is final, and what is written again when it changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from witcert_core.cache.packed import PackedKV, PackedLayer
from witcert_core.meter.attention import AttentionSpec
from witcert_core.quantizers.dither import DitherKey
from witcert_core.quantizers.rotary import RotarySpec
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.storage.outliers import ENOUGH, MOST, OutlierChoice

SLOTS, HKV, D, PAIRS = 400, 2, 32, 1
PAIR = RotarySpec(D).pair_channels()


def cache(bypassed: bool = True) -> PackedKV:
    def side(width: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(SLOTS, HKV, width, dtype=dtype)

    k, v, k_scale, v_scale = side(D, torch.int8), side(D, torch.int8), side(1, torch.float16), side(1, torch.float16)
    outliers = side(2 * PAIRS, torch.bfloat16) if bypassed else None
    layer = PackedLayer(k, v, k_scale, v_scale, None, outliers)
    return PackedKV({0: layer}, torch.ones(SLOTS, dtype=torch.int64), DitherKey(0, 0), (0, 1), RotarySpec(D))


def call(tokens: int, pair: int, first_slot: int = 0) -> AttentionCall:
    """Keys whose largest channels are those of a rotary pair."""
    k = torch.ones(tokens, HKV, D, dtype=torch.bfloat16)
    k[..., PAIR[pair]] = 5.0 + pair
    slots = torch.arange(first_slot, first_slot + tokens)
    return AttentionCall(0, k, k, k.clone(), slots, slots, AttentionSpec(1.0), lambda *_: k)


def chosen(of: PackedKV) -> list[int]:
    channels = of[0].channels
    assert channels is not None
    assert torch.equal(channels[0], channels[1])
    return channels[0].tolist()


def test_a_long_pass_decides_at_once() -> None:
    packed = cache()
    choice = OutlierChoice(packed)
    assert choice.before(call(ENOUGH, 3)) == []
    assert choice.before(call(ENOUGH, 7)) is None
    assert chosen(packed) == PAIR[3].tolist()


def test_short_passes_are_written_again_in_their_order() -> None:
    packed = cache()
    choice = OutlierChoice(packed)
    warm_up, answer = call(6, 3), call(1, 4, first_slot=6)
    assert choice.before(warm_up) == []
    assert choice.before(answer) is None
    assert chosen(packed) == PAIR[3].tolist()
    warm_up.exact_k.zero_()  # the engine uses its tensors again
    again = choice.before(call(ENOUGH, 9, first_slot=7))
    assert again is not None
    assert [c.slots.tolist() for c in again] == [list(range(6)), [6]]
    assert again[0].exact_k.amax() == 8.0
    assert chosen(packed) == PAIR[9].tolist()
    with pytest.raises(RuntimeError, match="over"):
        again[0].run(None, None)


def test_what_is_written_again_gets_the_row_of_the_pass_that_chose() -> None:
    """Also where the choice stays: another layer's may not, and a slot has one row for all layers.

    Tokens sampled over keys with the old row may have a part in the choice, and so in these keys' new scales.
    """
    packed = cache()
    choice = OutlierChoice(packed)
    choice.before(call(6, 9))
    packed.pass_ids[6 : 6 + ENOUGH] = 2
    again = choice.before(call(ENOUGH, 3, first_slot=6))
    assert again is not None
    assert [c.slots.tolist() for c in again] == [list(range(6))]
    assert chosen(packed) == PAIR[9].tolist()
    assert packed.pass_ids[: 6 + ENOUGH].tolist() == [2] * (6 + ENOUGH)


def test_what_is_kept_is_bounded_and_replays_end_it() -> None:
    packed = cache()
    choice = OutlierChoice(packed)
    for number in range(MOST):
        found = choice.before(call(1, 3 if number == 0 else 4, first_slot=number))
    assert found is None
    again = choice.before(call(1, 4, first_slot=MOST))
    assert again is not None
    assert len(again) == MOST
    assert chosen(packed) == PAIR[4].tolist()
    settled = OutlierChoice(fresh := cache())
    settled.before(call(1, 3))
    settled.settle()
    assert settled.before(call(ENOUGH, 4)) is None
    assert chosen(fresh) == PAIR[3].tolist()


def test_layers_without_outliers_choose_none() -> None:
    packed = cache(bypassed=False)
    assert OutlierChoice(packed).before(call(ENOUGH, 3)) is None
    assert packed[0].channels is None
