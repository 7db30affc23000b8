"""Bootstrap and AUROC against enumeration and their definitions."""

from __future__ import annotations

import itertools

import pytest
import torch

from witcert_core.errors import InputError
from witcert_core.evaluate.stats import (
    auroc,
    auroc_interval,
    bootstrap,
    mean_interval,
    paired_difference,
    ranks,
    spearman,
)


def test_auroc_is_the_share_of_pairs_in_order() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (2, 5, 30):
        for _ in range(20):
            score = torch.randint(0, 6, (size,), generator=generator).double()
            positive = torch.rand(size, generator=generator) < 0.4
            pairs = [(a, b) for a, b in itertools.product(score[positive].tolist(), score[~positive].tolist())]
            if not pairs:
                assert auroc(score, positive.double()).isnan()
                continue
            expected = sum((a > b) + (a == b) / 2 for a, b in pairs) / len(pairs)
            assert float(auroc(score, positive.double())) == pytest.approx(expected)


def test_ranks_of_equals_are_their_mean_and_correlations_those_of_ranks() -> None:
    x = torch.tensor([[3.0, 1.0, 3.0, 2.0], [0.0, float("inf"), 5.0, 5.0]])
    assert ranks(x).tolist() == [[3.5, 1.0, 3.5, 2.0], [1.0, 4.0, 2.5, 2.5]]
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randint(0, 9, (40,), generator=generator).double() for _ in range(2))
    expected = torch.corrcoef(torch.stack([ranks(first), ranks(second)]))[0, 1]
    assert float(spearman(first, second)) == pytest.approx(float(expected))
    assert float(spearman(first, first.exp())) == pytest.approx(1.0)
    assert float(spearman(first, -first)) == pytest.approx(-1.0)
    assert spearman(first, torch.ones(40)).isnan()


def test_infinite_scores_rank_first() -> None:
    assert float(auroc(torch.tensor([float("inf"), 1.0, 2.0]), torch.tensor([1.0, 0.0, 0.0]))) == 1.0
    both = auroc(torch.tensor([float("inf"), float("inf"), 2.0]), torch.tensor([1.0, 0.0, 0.0]))
    assert float(both) == 0.75


def test_the_interval_of_a_mean_is_that_of_all_resamples() -> None:
    """Six samples have 46656 equally likely resamples; their quantiles are what the bootstrap approximates."""
    values = [0.0, 1.0, 3.0, 7.0, 15.0, 31.0]
    every = torch.tensor([sum(x) / 6 for x in itertools.product(values, repeat=6)], dtype=torch.float64)
    found = mean_interval(values)
    assert found.value == pytest.approx(57 / 6)
    assert found.low == pytest.approx(float(every.quantile(0.025)), abs=0.3)
    assert found.high == pytest.approx(float(every.quantile(0.975)), abs=0.3)


def test_pairing_removes_what_the_samples_share() -> None:
    """Scores that vary wildly from sample to sample but always differ by one half: an interval of no width."""
    base = [float(i * i % 17) for i in range(40)]
    found = paired_difference([x + 0.5 for x in base], base)
    assert (found.value, found.low, found.high, found.count) == (0.5, 0.5, 0.5, 40)


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(1)
    hits = 0
    for trial in range(200):
        sample = torch.rand(40, generator=generator).tolist()
        found = mean_interval(sample, resamples=400, seed=trial)
        hits += found.low <= 0.5 <= found.high
    assert 180 <= hits <= 199


def test_the_interval_of_auroc() -> None:
    score, positive = [float(i) for i in range(40)], [i % 3 == 0 or i > 30 for i in range(40)]
    found = auroc_interval(score, positive)
    assert found is not None
    assert found.low < found.value < found.high <= 1.0
    assert auroc_interval([1.0, 2.0], [True, True]) is None


def test_what_has_no_interval_is_refused() -> None:
    with pytest.raises(InputError, match="of at least 1"):
        mean_interval([])
    with pytest.raises(InputError, match="paired"):
        paired_difference([1.0], [])
    with pytest.raises(InputError, match="none of the resamples"):
        bootstrap([torch.ones(3)], lambda x: x.mean(-1) * float("nan"))
