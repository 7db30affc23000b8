"""The search for a counter-example: over a hundred thousand cells of many shapes, attacked within their radii."""

import pytest
import torch
from cell_makers import attack, every_cell, supremum, total_variation_of_errors
from torch import Tensor

from witcert_core.meter.bounds import FORMS, extremal, meter
from witcert_core.meter.output import output_bound
from witcert_core.meter.sums import accumulate, accumulate_weights

CELLS_PER_SHAPE = {1: 10, 2: 70, 3: 70, 5: 70, 8: 70, 40: 60, 400: 15}
"""288 shapes each: 105,120 cells."""


def all_forms(p: Tensor, c: Tensor) -> dict[str, Tensor]:
    acc = accumulate_weights(p, c)
    single = acc * (1 + 2.0**-12)
    single[..., 3] = acc[..., 3] / (1 + 2.0**-12)
    values = {name: form(acc) for name, form in FORMS.items()}
    values |= {f"{name}, float32": FORMS[name](single.float()) for name in ("jensen", "needle")}
    return values | {"extremal": extremal.bound(p, c), "meter": meter(acc)[0]}


@pytest.mark.parametrize("tokens", CELLS_PER_SHAPE)
def test_no_attack_passes_any_form(tokens: int) -> None:
    cells, moved = 0, 0
    for p, c in every_cell(CELLS_PER_SHAPE[tokens], (tokens,), seed=100 + tokens):
        tv, eps = attack(p, c, seed=tokens)
        assert bool((eps.abs() <= c).all())
        for name, value in all_forms(p, c).items():
            low = value < tv
            assert not bool(low.any()), (name, p[low][0].tolist(), c[low][0].tolist(), eps[low][0].tolist())
        cells += len(p)
        moved += int((tv > 0).sum())
    assert cells == 288 * CELLS_PER_SHAPE[tokens]
    assert moved > 0.7 * cells if tokens > 1 else moved == 0


def test_enumeration_passes_no_form_and_the_attack_misses_little() -> None:
    ratios, quality = [], []
    for p, c in every_cell(4, (2, 7), seed=7):
        sup = supremum(p, c)
        values = all_forms(p, c)
        for name, value in values.items():
            assert bool((value >= sup).all()), name
        known = sup > 1e-13
        ratios.append((attack(p, c)[0] / sup)[known])
        quality.append((values["meter"] / sup)[known])
    found, tightness = torch.cat(ratios), torch.cat(quality)
    assert found.quantile(0.05) > 0.999
    assert tightness.median() < 1.05
    assert tightness.quantile(0.95) < 2.2


def test_shifts_common_to_all_tokens_change_nothing_and_are_still_covered() -> None:
    for p, c in every_cell(3, (6,), seed=9):
        smallest = c.amin(-1, keepdim=True)
        assert bool((total_variation_of_errors(p, smallest.expand_as(p)) == 0).all())
        assert bool((meter(accumulate_weights(p, c))[0] >= 0).all())


@pytest.mark.parametrize("has_sink", [False, True], ids=["plain", "sink"])
def test_no_attack_passes_the_output_bound(has_sink: bool) -> None:
    """The worst logit errors for TV, and values pushed along the way the output moves."""
    gen = torch.Generator().manual_seed(11)
    for p, c in every_cell(8, (3, 30), seed=12):
        tokens = p.shape[-1]
        p = p.clamp(min=1e-40)
        sink = torch.full((len(p),), -1.0, dtype=torch.float64) if has_sink else None
        _, eps = attack(p, c)
        v = torch.randn(tokens, 1, 4, generator=gen, dtype=torch.float64)
        rho = 0.3 * torch.rand(tokens, 1, generator=gen, dtype=torch.float64)
        acc = accumulate(p.log(), c, v, rho, sink)
        z, z_exact = p.log(), p.log() - eps
        values, reach = v[:, 0], rho[:, 0]
        if sink is not None:
            z, z_exact = torch.cat((z, sink[:, None]), -1), torch.cat((z_exact, sink[:, None]), -1)
            values, reach = torch.cat((values, values[:1] * 0)), torch.cat((reach, reach[:1] * 0))
        stored, exact = torch.softmax(z, -1), torch.softmax(z_exact, -1)
        moved = (exact - stored) @ values
        axis = torch.nn.functional.normalize(moved + 1e-9, dim=-1)
        moved = moved + (exact @ reach)[:, None] * axis
        norm = (stored @ values).norm(dim=-1)
        for distance in (meter(acc)[0], FORMS["jensen"](acc)):
            assert bool((output_bound(acc, distance, norm, has_sink) >= moved.norm(dim=-1)).all())
