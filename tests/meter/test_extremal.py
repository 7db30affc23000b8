import math

import pytest
import torch
from cell_makers import attack, every_cell, supremum
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.meter.bounds import extremal


def divisible_supremum(p: Tensor, c: Tensor, parts: int) -> Tensor:
    """Supremum when each token is cut into equal parts, by enumeration of the order statistics of attacks."""
    return supremum(p.repeat_interleave(parts, -1) / parts, c.repeat_interleave(parts, -1))


def test_it_is_the_supremum_of_tokens_cut_finely_and_never_below() -> None:
    gen = torch.Generator().manual_seed(0)
    p = torch.softmax(torch.randn(100, 3, generator=gen, dtype=torch.float64) * 2, -1)
    c = torch.rand(100, 3, generator=gen, dtype=torch.float64) * 2
    value = extremal.bound(p, c)
    whole, quarter = divisible_supremum(p, c, 1), divisible_supremum(p, c, 4)
    assert bool((value >= quarter).all())
    assert bool((quarter >= whole * (1 - 1e-12)).all())
    assert ((value - quarter) / value).max() < 0.1
    assert (value / quarter).median() < 1.01


def test_equal_radii_give_tanh() -> None:
    p = torch.softmax(torch.randn(50, 7, dtype=torch.float64), -1)
    for r in (1e-12, 1e-3, 1.0, 30.0, 38.0):
        value = extremal.bound(p, torch.full_like(p, r))
        torch.testing.assert_close(value, torch.full_like(value, math.tanh(r / 2)), rtol=1e-10, atol=0)
        assert bool((value >= math.tanh(r / 2)).all())


def test_two_level_radii_in_closed_form() -> None:
    """One token of mass m and radius c, the rest without error: m e^c / (m e^c + 1 - m) - m."""
    m, c = 0.01, 2.0
    p, r = torch.tensor([m, 0.6, 0.39], dtype=torch.float64), torch.tensor([c, 0.0, 0.0], dtype=torch.float64)
    expected = m * math.exp(c) / (m * math.exp(c) + 1 - m) - m
    assert extremal.bound(p, r).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("scale", [1e-15, 1e-12, 1e-8])
def test_tiny_suprema_keep_their_relative_precision(scale: float) -> None:
    gen = torch.Generator().manual_seed(1)
    p = torch.softmax(torch.randn(50, 9, generator=gen, dtype=torch.float64), -1)
    c = torch.rand(50, 9, generator=gen, dtype=torch.float64)
    first_order = extremal.bound(p, c * scale) / scale
    reference = extremal.bound(p, c * 1e-5) / 1e-5
    torch.testing.assert_close(first_order, reference, rtol=2e-4, atol=0)


def test_the_closed_form_share_beats_every_other_share() -> None:
    """The split of the critical token is at the maximum: a fine scan of shares finds nothing above."""
    gen = torch.Generator().manual_seed(2)
    p = torch.softmax(torch.randn(200, 5, generator=gen, dtype=torch.float64) * 2, -1)
    c = torch.rand(200, 5, generator=gen, dtype=torch.float64) * torch.logspace(-6, 1, 200).double()[:, None]
    c, order = c.sort(-1, descending=True)
    p = p.gather(-1, order)
    best = torch.zeros(200, dtype=torch.float64)
    for t in range(5):
        for share in torch.linspace(0, 1, 101, dtype=torch.float64):
            raised = torch.cat((torch.ones(t), share[None], torch.zeros(4 - t))).double()
            up = (p * raised * torch.expm1(c)).sum(-1)
            down = (p * (1 - raised) * -torch.expm1(-c)).sum(-1)
            alpha = (p * raised).sum(-1)
            best = torch.maximum(best, (up * (1 - alpha) + alpha * down) / (1 + up - down))
    value = extremal.bound(p, c)
    assert bool((value >= best * (1 - 1e-14)).all())
    assert (value / best).median() < 1.001


def test_unnormalised_weights_are_normalised() -> None:
    p, c = (
        torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64),
        torch.tensor([1.0, 0.2, 0.0], dtype=torch.float64),
    )
    assert extremal.bound(p * 7, c).item() == pytest.approx(extremal.bound(p, c).item(), rel=1e-12)


@pytest.mark.parametrize(
    ("p", "c"),
    [
        ([0.5, 0.5], [math.nan, 0.0]),
        ([0.5, 0.5], [39.0, 0.0]),
        ([1.0, 0.0], [0.0, math.inf]),
        ([math.nan, 0.5], [0.1, 0.1]),
        ([0.0, 0.0], [0.1, 0.1]),
        ([-0.5, 1.5], [0.1, 0.1]),
    ],
)
def test_what_is_not_a_cell_says_one(p: list[float], c: list[float]) -> None:
    good = (
        torch.tensor([[0.5, 0.5], p], dtype=torch.float64),
        torch.tensor([[0.1, 0.1], c], dtype=torch.float64),
    )
    assert extremal.bound(*good).tolist() == [pytest.approx(math.tanh(0.05)), 1.0]


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="one shape"):
        extremal.bound(torch.zeros(2, 3), torch.zeros(2, 4))


def test_attacks_reach_it_when_tokens_are_fine() -> None:
    """Not only never passed but reached: with 400 tokens the best attack is within a few per cent."""
    batches = [b for b in every_cell(2, (400,), seed=3) if b[1].max() < 3 and b[0].max() < 0.1]
    for p, c in batches:
        found, _ = attack(p, c)
        value = extremal.bound(p, c)
        assert bool((value >= found).all())
        assert bool((value <= found * 1.1 + 1e-13).all())
