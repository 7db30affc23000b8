import math

import pytest
import torch
from cell_makers import attack, supremum
from torch import Tensor

from witcert_core.meter.bounds import FORMS, jensen, needle
from witcert_core.meter.sums import accumulate_weights


def needle_cells(p_h: float, tokens: int, cells: int, seed: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    rest = torch.softmax(torch.randn(cells, tokens - 1, generator=gen, dtype=torch.float64), -1)
    p = torch.cat((torch.full((cells, 1), p_h, dtype=torch.float64), rest * (1 - p_h)), -1)
    return p, scale * torch.rand(cells, tokens, generator=gen, dtype=torch.float64)


@pytest.mark.parametrize("p_h", [0.5, 0.9, 0.97, 0.9999])
def test_needle_cells_are_nearly_exact_where_jensen_is_loose(p_h: float) -> None:
    p, c = needle_cells(p_h, 10, 200, seed=0)
    sup = supremum(p, c)
    acc = accumulate_weights(p, c)
    ratio = needle.bound(acc) / sup
    assert bool((ratio >= 1.0).all())
    assert ratio.median() < 1.06
    if p_h >= 0.97:
        assert (jensen.bound(acc) / sup).median() > 3.0
        assert ratio.quantile(0.95) < 1.05


def test_a_light_rest_with_large_radii() -> None:
    """The heavy token is safe and the rest can grow e^8-fold: the gain comes from not attacking it."""
    p, c = needle_cells(0.999, 8, 300, seed=1, scale=8.0)
    c[:, 0] = 0.01
    sup = supremum(p, c)
    value = needle.bound(accumulate_weights(p, c))
    assert bool((value >= sup).all())
    assert (value / sup).median() < 1.2


@pytest.mark.parametrize("c_h", [0.0, 0.1, 5.0, 38.0])
def test_a_single_token_cannot_be_moved(c_h: float) -> None:
    acc = accumulate_weights(torch.ones(1, dtype=torch.float64), torch.tensor([c_h], dtype=torch.float64))
    assert needle.bound(acc).item() == 0.0


def test_ties_for_the_heaviest_token() -> None:
    p = torch.full((1, 4), 0.25, dtype=torch.float64)
    c = torch.tensor([[1.0, 0.1, 0.1, 0.1]], dtype=torch.float64)
    for turn in range(4):
        rolled = c.roll(turn, -1)
        assert needle.bound(accumulate_weights(p, rolled)) >= supremum(p, rolled)


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 20.0])
def test_two_tokens_over_the_whole_range_of_weights(scale: float) -> None:
    light = torch.logspace(-30, math.log10(0.5), 400, dtype=torch.float64)
    p = torch.stack((1 - light, light), -1)
    for share in ([1.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.3, 1.0]):
        c = scale * torch.tensor(share, dtype=torch.float64).expand(400, 2)
        assert bool((needle.bound(accumulate_weights(p, c)) >= supremum(p, c)).all())


def test_long_needle_cells_under_attack() -> None:
    p, c = needle_cells(0.97, 2000, 40, seed=2, scale=2.0)
    found, _ = attack(p, c)
    acc = accumulate_weights(p, c)
    value = needle.bound(acc)
    assert bool((value >= found).all())
    assert (value / found).median() < 1.1
    assert bool((value < FORMS["tanh"](acc)).all())
