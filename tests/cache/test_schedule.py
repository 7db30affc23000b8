"""Which tokens are quantized when: by length alone, once, in whole groups, and never half of a shared one."""

from __future__ import annotations

import pytest
import torch

from witcert_core.cache.schedule import PendingTokens, QuantizeSchedule
from witcert_core.errors import UnsupportedError

GROUPED = QuantizeSchedule(token_group=4, recent_tokens=3)
CALIBRATED = QuantizeSchedule(calibration_tokens=8)
SLOTS = torch.randperm(64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("rule", "closed"),
    [
        (QuantizeSchedule(), {0: 0, 1: 1, 7: 7}),
        (QuantizeSchedule(token_group=4), {3: 0, 4: 4, 7: 4, 8: 8}),
        (GROUPED, {6: 0, 7: 4, 10: 4, 11: 8}),
        (QuantizeSchedule(recent_tokens=5), {5: 0, 6: 1, 9: 4}),
        (CALIBRATED, {7: 0, 8: 8, 9: 9}),
        (QuantizeSchedule(4, 4, 8), {7: 0, 8: 4, 12: 8}),
    ],
)
def test_closed_tokens_by_length(rule: QuantizeSchedule, closed: dict[int, int]) -> None:
    assert {length: rule.num_quantized(length) for length in closed} == closed
    assert rule.immediate == (rule == QuantizeSchedule())


@pytest.mark.parametrize(
    ("rule", "length", "new", "sizes"),
    [
        (QuantizeSchedule(), 5, 40, [40]),
        (QuantizeSchedule(), 5, 0, []),
        (CALIBRATED, 20, 40, [40]),
        (CALIBRATED, 5, 40, [2, 38]),
        (GROUPED, 8, 12, [2, 4, 4, 2]),
        (QuantizeSchedule(token_group=32, recent_tokens=96), 200, 480, [23, *[32] * 14, 9]),
        (QuantizeSchedule(recent_tokens=5), 20, 3, [1, 1, 1]),
    ],
)
def test_tokens_are_fed_in_together_as_long_as_each_reads_what_it_would_read_alone(
    rule: QuantizeSchedule, length: int, new: int, sizes: list[int]
) -> None:
    assert rule.passes(length, new) == sizes
    for size in sizes:
        end = length + size
        for own in range(length + 1, end + 1):
            assert min(rule.num_quantized(end), own) == rule.num_quantized(own)
        length = end


def test_people_are_told_when_tokens_are_quantized() -> None:
    assert QuantizeSchedule().describe() == "as they are written"
    assert QuantizeSchedule(4, 8, 16).describe() == (
        "in groups of 4 tokens, once 8 newer ones are there, after a calibration on the first 16; exact until then"
    )


def grow(tokens: PendingTokens, slots: torch.Tensor, chunks: list[int]) -> list[list[int]]:
    """Write a request chunk by chunk; the positions closed in each pass."""
    found, done = [], 0
    for chunk in chunks:
        tokens.written(slots[done : done + chunk])
        done += chunk
        due = tokens.ready([slots[:done]])
        assert torch.equal(due.slots, slots[due.positions])
        found.append(due.positions.tolist())
    return found


@pytest.mark.parametrize("chunks", [[23], [1] * 23, [6, 1, 1, 9, 6]], ids=str)
def test_chunks_do_not_matter_and_nothing_is_closed_twice(chunks: list[int]) -> None:
    tokens = PendingTokens(GROUPED, 64)
    passes = grow(tokens, SLOTS, chunks)
    assert [position for closed in passes for position in closed] == list(range(20))
    assert all(len(p) % 4 == 0 for p in passes)
    assert sorted(tokens.quantized.nonzero().flatten().tolist()) == sorted(SLOTS[:20].tolist())
    assert tokens.ready([SLOTS[:23]]).slots.numel() == 0


def test_a_reused_slot_is_open_again() -> None:
    tokens = PendingTokens(GROUPED, 64)
    grow(tokens, SLOTS, [16])
    tokens.written(SLOTS[:4])
    assert tokens.ready([SLOTS[:16]]).positions.tolist() == [0, 1, 2, 3]


def test_shared_groups_are_closed_once_by_whoever_gets_there_first() -> None:
    """A stops with an open tail; B and C share it in whole groups and go on: one of them closes it, in one pass."""
    tokens = PendingTokens(GROUPED, 64)
    assert grow(tokens, SLOTS, [9]) == [[0, 1, 2, 3]]
    b, c = (torch.cat([SLOTS[:8], SLOTS[start : start + 4]]) for start in (20, 30))
    for own in (b, c):
        tokens.written(own[8:])
    due = tokens.ready([b, c])
    assert due.positions.tolist() == [4, 5, 6, 7]
    assert torch.equal(due.slots, SLOTS[4:8])


def test_requests_that_part_inside_a_group_are_refused() -> None:
    tokens = PendingTokens(GROUPED, 64)
    grow(tokens, SLOTS, [16])
    other = torch.cat([SLOTS[:6], SLOTS[20:30]])
    tokens.written(other[6:])
    with pytest.raises(UnsupportedError, match="group of 4 tokens is quantized in part already"):
        tokens.ready([other])


@pytest.mark.parametrize(
    ("rule", "unit", "fine"),
    [
        (QuantizeSchedule(), 1, True),
        (GROUPED, 8, True),
        (GROUPED, 2, False),
        (CALIBRATED, 16, True),
        (CALIBRATED, 9, False),
    ],
)
def test_units_in_which_an_engine_may_share(rule: QuantizeSchedule, unit: int, fine: bool) -> None:
    assert rule.may_share(unit) is fine


def test_the_state_belongs_to_the_calibrated_prefix() -> None:
    tokens = PendingTokens(CALIBRATED, 64)
    tokens.written(SLOTS[:10])
    first = tokens.ready([SLOTS[:10]])
    (anchor,) = first.calibrating
    assert anchor == int(SLOTS[7])
    assert torch.equal(first.calibrating[anchor], SLOTS[:8])
    tokens.set_state(anchor, 3, "k", torch.full((2, 1), 5.0))
    sharing = torch.cat([SLOTS[:8], SLOTS[20:22]])
    tokens.written(SLOTS[20:22])
    second = tokens.ready([sharing])
    assert not second.calibrating
    assert torch.equal(tokens.state(second.anchors, 3, "k"), torch.full((2, 2, 1), 5.0))
    tokens.moved(SLOTS[50:51], SLOTS[7:8])
    assert tokens.num_states == 2
    assert bool(tokens.quantized[SLOTS[50]])
    tokens.written(SLOTS[:10])
    assert tokens.num_states == 1
    tokens.overwritten(SLOTS[50:51])
    assert tokens.num_states == 0


def test_a_state_that_is_gone_while_its_tokens_are_in_use_is_refused() -> None:
    tokens = PendingTokens(CALIBRATED, 64)
    grow(tokens, SLOTS, [10])
    tokens.overwritten(SLOTS[7:8])
    tokens.written(SLOTS[10:11])
    with pytest.raises(UnsupportedError, match="calibration over a request's first 8 tokens is gone"):
        tokens.ready([SLOTS[:11]])
