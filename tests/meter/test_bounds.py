import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from cell_makers import total_variation_of_errors
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.meter.bounds import FORM_NAMES, FORMS, extremal, meter
from witcert_core.meter.bounds.shared import MAX_RADIUS, unit_edges
from witcert_core.meter.sums import SUM_SLACK, AccField, accumulate_weights

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "bounds.json").read_text())["cases"]


def cell(p: list[float], c: list[float]) -> tuple[Tensor, Tensor]:
    return torch.tensor(p, dtype=torch.float64), torch.tensor(c, dtype=torch.float64)


def every_form(p: Tensor, c: Tensor) -> dict[str, Tensor]:
    acc = accumulate_weights(p, c)
    values = {name: form(acc) for name, form in FORMS.items()}
    return values | {
        "extremal": extremal.bound(p, c),
        "meter": meter(acc)[0],
        "reference": extremal.bound(p, c).clamp(max=1.0),
    }


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: f"S{len(case['radius'])}-{case['sup_tv']:.4g}")
def test_known_suprema(case: dict[str, Any]) -> None:
    p, c = cell(case["p_compressed"], case["radius"])
    values = every_form(p, c)
    for name, value in values.items():
        assert value >= case["sup_tv"], name
    for name in ("eform", "tanh", "rms"):
        assert values[name].item() == pytest.approx(case[name], rel=1e-9)
        assert values[name] >= case[name] * (1 - 1e-14)
    # The file's own figure carries a rounding error of 1e-16 in absolute terms.
    assert values["extremal"].item() == pytest.approx(case["fractional_sup"], rel=1e-12, abs=1e-15)
    log_a = accumulate_weights(p, c)[AccField.LOG_A].item()
    assert case["log_A"] * (1 - 1e-14) <= log_a <= case["log_A"] * (1 + 1e-9) + 1e-9


def test_closed_forms_of_a_single_pair() -> None:
    """p = (1/2, 1/2), c = (r, r): A = e^r, Q = (e^r - 1)^2, and tanh(r/2) is the divisible supremum."""
    values = every_form(*cell([0.5, 0.5], [0.3, 0.3]))
    a = math.exp(0.3)
    assert values["eform"].item() == pytest.approx((a * a - 1) / 2)
    assert values["rms"].item() == pytest.approx(a * (a - 1) / 2)
    assert values["tanh"].item() == pytest.approx(math.tanh(0.15))
    assert values["extremal"].item() == pytest.approx(math.tanh(0.15), rel=1e-9)


def test_no_radius_no_bound() -> None:
    values = every_form(*cell([0.7, 0.2, 0.1], [0.0, 0.0, 0.0]))
    assert {name: value.item() for name, value in values.items()} == dict.fromkeys(values, 0.0)


@pytest.mark.parametrize("radius", [MAX_RADIUS * 1.0001, 1000.0, math.inf, math.nan, -0.1])
def test_too_large_or_unknown_radii_make_the_meter_one(radius: float) -> None:
    values = every_form(*cell([0.9, 0.1, 0.0], [0.0, 0.0, radius]))
    for name, value in values.items():
        assert value.item() == (math.inf if name in ("eform", "rms") else 1.0), name


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("field", list(AccField)[: AccField.MASS_R + 1])
def test_a_spoilt_accumulator_makes_the_meter_one(field: AccField, bad: float) -> None:
    acc = accumulate_weights(*cell([0.7, 0.2, 0.1], [0.1, 0.2, 0.3])).repeat(2, 1)
    acc[0, field] = bad
    value, form = meter(acc)
    assert value[0] == 1.0
    assert value[1] < 0.2
    assert form[0] == FORM_NAMES.index("tanh")


def test_the_meter_is_the_least_form_and_says_which() -> None:
    gen = torch.Generator().manual_seed(0)
    p = torch.softmax(torch.randn(300, 12, generator=gen, dtype=torch.float64) * 3, -1)
    acc = accumulate_weights(p, torch.rand(300, 12, generator=gen, dtype=torch.float64))
    value, form = meter(acc)
    names = ("tanh", "jensen", "needle")
    table = torch.stack([FORMS[name](acc) for name in names], -1)
    assert torch.equal(value, table.amin(-1).clamp(max=1.0))
    assert [FORM_NAMES[i] for i in form.tolist()] == [names[i] for i in table.argmin(-1).tolist()]
    assert len(set(form.tolist())) >= 2


def test_forms_keep_leading_dimensions() -> None:
    p = torch.softmax(torch.randn(2, 3, 4, 9), -1)
    c = torch.rand(2, 3, 4, 9)
    flat = every_form(p.reshape(24, 9), c.reshape(24, 9))
    for name, value in every_form(p, c).items():
        assert value.shape == (2, 3, 4)
        assert value.dtype == torch.float64
        torch.testing.assert_close(value.reshape(24), flat[name], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", FORMS)
def test_single_precision_accumulators_are_read_with_their_own_slack(name: str) -> None:
    """Every sum anywhere within its slack: the form is never below the one of the exact sums."""
    gen = torch.Generator().manual_seed(4)
    slack = 2 * SUM_SLACK[torch.float32] * (1 - 2.0**-10)
    p = torch.softmax(torch.randn(800, 20, generator=gen, dtype=torch.float64) * 3, -1)
    scale = torch.logspace(-6, 1, 800).double()[:, None]
    c = scale * (1 + 0.01 * torch.rand(800, 20, generator=gen, dtype=torch.float64))
    c[::2] *= torch.rand(400, 20, generator=gen, dtype=torch.float64)
    exact = accumulate_weights(p, c)
    value = FORMS[name](exact)
    for trial in range(20):
        factor = 1 + slack * torch.rand(exact.shape, generator=gen).round().double()
        factor[:, [AccField.M, AccField.C_H, AccField.M_R]] = 1.0
        factor = factor * (1 + 2.0**-22)  # so that the cast to float32 below never rounds inward
        kernel = exact * factor
        kernel[:, AccField.P_H] = exact[:, AccField.P_H] / factor[:, AccField.P_H]
        kernel = torch.where(kernel > 0, kernel, exact).float()
        assert bool((FORMS[name](kernel) >= value).all()), trial
    assert bool((FORMS[name](exact.float() * (1 + 2.0**-20)) <= 1.2 * value + 1e-9).all())


def test_intervals_tile_the_unit_interval() -> None:
    edges = unit_edges(torch.device("cpu"))
    assert edges[0] == 0.0
    assert edges[-1] == 1.0
    assert bool((edges.diff() > 0).all())
    assert edges.diff().max() == 1 / 64


@pytest.mark.parametrize("acc", [torch.zeros(2, 16, dtype=torch.float16), torch.zeros(2, 15)], ids=["dtype", "width"])
def test_other_accumulators_are_refused(acc: Tensor) -> None:
    with pytest.raises(InputError, match="float32 or float64"):
        meter(acc)


@st.composite
def cells(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    size = draw(st.integers(1, 9))
    logits = draw(st.lists(st.floats(-40, 40), min_size=size, max_size=size))
    tiny = st.floats(0, 2.0**-30)
    c = draw(st.lists(st.one_of(st.floats(0, 38), st.floats(0, 1), tiny, st.just(0.0)), min_size=size, max_size=size))
    part = draw(st.lists(st.one_of(st.floats(-1, 1), st.sampled_from([-1.0, 1.0])), min_size=size, max_size=size))
    p = torch.softmax(torch.tensor(logits, dtype=torch.float64), -1)
    radius = torch.tensor(c, dtype=torch.float64)
    return p, radius, radius * torch.tensor(part, dtype=torch.float64)


@settings(max_examples=600, deadline=None)
@given(cells())
def test_no_error_within_the_radii_ever_passes_a_bound(cell: tuple[Tensor, Tensor, Tensor]) -> None:
    p, c, eps = cell
    tv = total_variation_of_errors(p, eps)
    for name, value in every_form(p, c).items():
        assert value >= tv, name


@settings(max_examples=200, deadline=None)
@given(cells(), st.randoms())
def test_bounds_do_not_depend_on_the_order_of_tokens(cell: tuple[Tensor, Tensor, Tensor], random: Random) -> None:
    p, c, _ = cell
    assume(len(p) == 1 or p.topk(2).values.diff() != 0)  # equally heavy tokens: the first is set apart
    order = list(range(len(p)))
    random.shuffle(order)
    turned = every_form(p[order], c[order])
    for name, value in every_form(p, c).items():
        assert turned[name].item() == pytest.approx(value.item(), rel=1e-9, abs=1e-300)


@settings(max_examples=200, deadline=None)
@given(cells(), st.floats(1.0, 3.0))
def test_the_supremum_grows_with_the_radii(cell: tuple[Tensor, Tensor, Tensor], factor: float) -> None:
    p, c, _ = cell
    wider = torch.minimum(c * factor, torch.full_like(c, MAX_RADIUS))
    assert extremal.bound(p, wider) >= extremal.bound(p, c) * (1 - 1e-12)
