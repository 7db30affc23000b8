"""Exact copies keep the copy of the token last written into a slot, or says that it has none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from witcert_core.cache.exact_copies import ExactCopies
from witcert_core.errors import InputError

SLOTS, HKV, D, LAYERS = 12, 2, 4, (3, 7)


def copies(num_copies: int) -> ExactCopies:
    return ExactCopies(
        layers=LAYERS,
        num_slots=SLOTS,
        num_copies=num_copies,
        num_kv_heads=HKV,
        head_dim=D,
        v_head_dim=D + 1,
        dtype=torch.float32,
    )


def tokens(stamp: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that spell their stamp and place."""
    base = stamp * 100 + torch.arange(count, dtype=torch.float32)
    return base[:, None, None].expand(count, HKV, D), -base[:, None, None].expand(count, HKV, D + 1)


@settings(deadline=None)
@given(
    rows=st.integers(1, SLOTS + 3),
    writes=st.lists(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=6, unique=True), max_size=20),
)
def test_a_copy_is_the_last_write_or_absent(rows: int, writes: list[list[int]]) -> None:
    store = copies(rows)
    truth: dict[int, float] = {}
    order: list[int] = []
    for stamp, slots in enumerate(writes):
        k, v = tokens(stamp, len(slots))
        index = torch.tensor(slots)
        store.claim(index)
        for layer in LAYERS:
            store.put(layer, index, k + layer, v)
        for place, slot in enumerate(slots):
            truth[slot] = stamp * 100.0 + place
        order = [s for s in order if s not in slots] + slots
    everything = torch.arange(SLOTS)
    here = store.has(everything)
    assert int(here.sum()) == min(rows, len(truth))
    if rows >= SLOTS:
        assert set(everything[here].tolist()) == set(truth)
    for slot in everything[here].tolist():
        for layer in LAYERS:
            k, v = store.get(layer, torch.tensor([slot]), 1)
            assert (k == truth[slot] + layer).all()
            assert (v == -truth[slot]).all()


def test_the_copy_used_longest_ago_goes_first() -> None:
    store = copies(3)
    for slot in (0, 1, 2):
        index = torch.tensor([slot])
        store.claim(index)
        for layer in LAYERS:
            store.put(layer, index, *tokens(slot, 1))
    store.claim(torch.tensor([5]))
    assert store.has(torch.tensor([0, 1, 2, 5])).tolist() == [False, True, True, True]
    store.get(3, torch.tensor([2]), 0)  # what is repaired does not count
    store.touch(torch.tensor([1]))  # used now, so 2 is the oldest
    store.claim(torch.tensor([6]))
    assert store.has(torch.tensor([1, 2, 5, 6])).tolist() == [True, False, True, True]


def test_a_missing_copy_is_an_error_and_no_room_is_refused() -> None:
    with pytest.raises(InputError, match="slot 4 is gone"):
        copies(3).get(3, torch.tensor([4]), 0)
    with pytest.raises(InputError, match="at least one"):
        copies(0)
    assert copies(3).nbytes == len(LAYERS) * 3 * HKV * (2 * D + 1) * 4
