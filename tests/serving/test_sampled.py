"""Exact copies for a sample of requests: reproducible draws, bounded bytes, and never a wrong truth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from witcert_core.cache.exact_copies import ExactCopies
from witcert_core.errors import UnsupportedError
from witcert_core.policy.model import parse_policy
from witcert_core.quantizers.rotary import RotarySpec
from witcert_core.report.sample import Distribution
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.passes import RequestPass, RowPlan, RowPlanner
from witcert_core.serving.ranks import Ranks
from witcert_core.serving.sampled import EVICTED, NO_ROOM, PREFIX, RequestSample, SampledCopies, sampled_copies

LAYER, SLOTS, HKV, D = 0, 256, 2, 8


def copies(rows: int, share: float = 1.0, seed: int = 0) -> SampledCopies:
    store = ExactCopies(
        layers=[LAYER],
        num_slots=SLOTS,
        num_copies=rows,
        num_kv_heads=HKV,
        head_dim=D,
        v_head_dim=D,
        dtype=torch.float32,
    )
    return SampledCopies(RequestSample(share, seed), store, [LAYER])


class Passes:
    """Passes over requests whose slots are given; every row is metered."""

    def __init__(self, sampled: SampledCopies) -> None:
        self.sampled = sampled
        self.planner = RowPlanner(stride=1, max_rows=SLOTS, audit_every=0, stored_prefill=True)

    def run(self, **requests: tuple[torch.Tensor, int]) -> tuple[RowPlan, dict[str, int]]:
        """name=(all slots, how many of them are new): the plan and the rows that are not audited, by reason."""
        passes = [RequestPass(name, slots, new) for name, (slots, new) in requests.items()]
        self.sampled.begin(passes, torch.cat([p.slots[-p.new_tokens :] for p in passes]))
        plan, missed = self.sampled.plan(self.planner.plan(passes), passes)
        reasons: dict[str, int] = {}
        for (_, reason), count in missed.items():
            reasons[reason] = reasons.get(reason, 0) + count
        return plan, reasons


def test_the_draw_is_repeatable_keyed_and_of_the_right_size() -> None:
    draws = [[RequestSample(0.1, seed).draw() for _ in range(1)] for seed in (1, 1)]
    assert draws[0] == draws[1]
    first, again, other = (RequestSample(0.1, seed) for seed in (1, 1, -2))
    series = [[sample.draw() for _ in range(4000)] for sample in (first, again, other)]
    assert series[0] == series[1] != series[2]
    assert all(320 <= sum(drawn) <= 480 for drawn in series)
    assert not any(RequestSample(0.0, 3).draw() for _ in range(100))
    assert all(RequestSample(1.0, 3).draw() for _ in range(100))


def test_many_requests_stay_within_the_bytes_and_the_oldest_go_first() -> None:
    sampled = copies(rows=24)
    passes = Passes(sampled)
    bytes_before = sampled.nbytes
    for number in range(20):
        slots = torch.arange(8) + 8 * number
        plan, missed = passes.run(**{f"r{number}": (slots, 8)})
        assert plan.audited.all()
        assert not missed
        assert sampled.nbytes == bytes_before
        assert int(sampled.copies.has(torch.arange(SLOTS)).sum()) <= 24
    # The three newest are still whole; one that made room goes on without being audited, and says why.
    plan, missed = passes.run(r19=(torch.cat([slots, torch.tensor([200])]), 1))
    assert plan.audited.tolist() == [True]
    old = torch.cat([torch.arange(8) + 8 * 10, torch.tensor([201])])
    plan, missed = passes.run(r10=(old, 1))
    assert plan.audited.tolist() == [False]
    assert missed == {EVICTED: 1}


def test_requests_of_one_pass_do_not_drive_each_other_out() -> None:
    passes = Passes(copies(rows=24))
    plan, missed = passes.run(**{n: (torch.arange(10) + 10 * i, 10) for i, n in enumerate("abc")})
    assert plan.audited.tolist() == [True] * 20 + [False] * 10
    assert missed == {NO_ROOM: 10}


def test_a_shared_prefix_is_audited_only_with_its_copies() -> None:
    passes = Passes(copies(rows=100))
    passes.run(a=(torch.arange(10), 10))
    plan, missed = passes.run(b=(torch.arange(13), 3))  # the copies of a's tokens serve b as well
    assert plan.audited.all()
    assert not missed
    plan, missed = passes.run(c=(torch.cat([torch.arange(50, 60), torch.arange(20, 23)]), 3))
    assert not plan.audited.any()
    assert missed == {PREFIX: 3}
    plan, missed = passes.run(d=(torch.arange(100, 110), 10), e=(torch.arange(100, 114), 4))  # both in one pass
    assert plan.audited.all()


def test_a_slot_that_is_written_again_has_no_copy_of_what_it_held() -> None:
    sampled = copies(rows=100)
    passes = Passes(sampled)
    passes.run(a=(torch.arange(10), 10))
    sampled.sample.share = 0.0
    passes.run(other=(torch.arange(5, 8), 3))  # not of the sample, in slots that a had
    plan, missed = passes.run(a=(torch.arange(11), 1))
    assert not plan.audited.any()
    assert missed == {EVICTED: 1}
    sampled.sample.share = 1.0
    passes.run(b=(torch.arange(20, 30), 10))
    sampled.drop(torch.tensor([22]))  # the engine moved something there
    assert passes.run(b=(torch.arange(20, 31), 1))[1] == {EVICTED: 1}


def test_what_is_not_drawn_costs_and_says_nothing() -> None:
    sampled = copies(rows=10, share=0.0)
    plan, missed = Passes(sampled).run(a=(torch.arange(10), 10))
    assert not plan.audited.any()
    assert not missed
    assert not sampled.copies.has(torch.arange(SLOTS)).any()


@pytest.mark.parametrize("values", [torch.rand(5000).double() ** 3, torch.tensor([0, 3e-20, 5, torch.inf]).double()])
def test_quantiles_are_those_of_the_values_rounded_up(values: torch.Tensor) -> None:
    distribution = Distribution()
    for part in values.split(7):
        distribution.add(part)
    for share in (0.5, 0.9, 0.99):
        exact = float(values.sort().values[max(int(torch.tensor(share * len(values)).ceil()) - 1, 0)])
        assert exact <= distribution.quantile(share) <= max(exact * 2**0.125 * (1 + 1e-9), 2.0**-40)
    found: Any = distribution.as_dict()
    assert found["max"] == ("inf" if values.isinf().any() else float(values.max()))


def test_a_pool_without_room_for_a_token_is_refused() -> None:
    geometry = Geometry(
        backend="test",
        total_qo_heads=4,
        layers=(0, 1),
        num_qo_heads=4,
        num_kv_heads=2,
        kv_head_ids=(0, 1),
        head_dim=32,
        v_head_dim=32,
        num_slots=10,
        pool_dtype=torch.float16,
        rotary=RotarySpec(32),
        device="cpu",
    )
    meter = {"audit_share": 0.01, "share_bytes": 511}
    policy = parse_policy({"version": 1, "quantizer": {"name": "int4_token_group"}, "meter": meter})
    with pytest.raises(UnsupportedError, match="share_bytes is 511; one token of this model takes 512 bytes"):
        sampled_copies(policy, geometry, Ranks(0, 1, None, 0))
