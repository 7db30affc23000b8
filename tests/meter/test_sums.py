import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.meter.sums import SUM_SLACK, AccField, accumulate, accumulate_weights

SLACK = SUM_SLACK[torch.float64]


def field(acc: Tensor, name: str) -> Tensor:
    return acc[..., AccField[name]]


def between(value: Any, low: Any, high: Any = None) -> bool:
    """Outward: at least the exact value, at most a little above."""
    return bool(low <= value <= (high or low) * (1 + 4 * SLACK) + 1e-300)


def test_every_field_against_a_plain_loop() -> None:
    torch.manual_seed(0)
    logits, c = torch.randn(4, 37, dtype=torch.float64) * 3, torch.rand(4, 37, dtype=torch.float64)
    v, rho = torch.randn(37, 2, 5), torch.rand(37, 2)
    acc = accumulate(logits, c, v, rho)
    for head in range(4):
        p = torch.softmax(logits[head], -1)
        x, h = torch.expm1(c[head]), int(p.argmax())
        rest = [i for i in range(37) if i != h]
        value, radius = v[:, head // 2].double(), rho[:, head // 2].double()
        out = (p[:, None] * value).sum(0)
        up = {
            "ETA": (p * x).sum(),
            "Q": (p * x * x).sum(),
            "M": c[head].max(),
            "C_H": c[head, h],
            "ETA_R": (p * x)[rest].sum(),
            "Q_R": (p * x * x)[rest].sum(),
            "M_R": c[head][rest].max(),
            "MASS_R": p[rest].sum(),
            "LOG_A": (p * c[head].exp()).sum().log(),
            "V2": (p * value.square().sum(-1)).sum(),
            "RHO1": (p * radius).sum(),
            "RHO2": (p * radius.square()).sum(),
            "RHO_MAX": radius.max(),
            "V_RADIUS": (value - out).norm(dim=-1).max(),
        }
        for name, exact in up.items():
            assert between(field(acc, name)[head].item(), exact.item() * (1 - 1e-14)), name
        assert p[h] * (1 - 4 * SLACK) <= field(acc, "P_H")[head] <= p[h]
        assert field(acc, "RHO_MIN")[head] == radius.min()


def test_tiny_radii_are_not_lost_at_long_context() -> None:
    """expm1, not A - 1: the difference loses everything below the unit roundoff of 1."""
    acc = accumulate(torch.zeros(1, 100_000), torch.full((1, 100_000), 1e-15, dtype=torch.float64))
    assert between(field(acc, "ETA").item(), 1e-15 * (1 - 1e-14))
    assert between(field(acc, "Q").item(), 1e-30 * (1 - 1e-14))
    assert between(field(acc, "LOG_A").item(), 1e-15 * (1 - 1e-14))


def test_sums_round_up_against_exact_arithmetic() -> None:
    gen = torch.Generator().manual_seed(1)
    p = torch.softmax(torch.randn(2000, generator=gen, dtype=torch.float64), -1)
    c = torch.rand(2000, generator=gen, dtype=torch.float64)
    exact = sum(Fraction(a) * Fraction(math.expm1(b)) for a, b in zip(p.tolist(), c.tolist(), strict=True))
    assert Fraction(field(accumulate_weights(p, c), "ETA").item()) >= exact


def test_a_sink_is_one_more_token_without_radius_and_value() -> None:
    torch.manual_seed(2)
    logits, c, sink = torch.randn(2, 9), torch.rand(2, 9), torch.randn(2) + 3
    v, rho = torch.randn(9, 1, 4), torch.rand(9, 1) + 0.1
    with_sink = accumulate(logits, c, v, rho, sink)
    longer = accumulate(
        torch.cat((logits, sink[:, None]), -1),
        torch.cat((c, torch.zeros(2, 1)), -1),
        torch.cat((v, torch.zeros(1, 1, 4))),
        torch.cat((rho, torch.zeros(1, 1))),
    )
    assert torch.equal(with_sink, longer)
    assert field(with_sink, "RHO_MIN").tolist() == [0.0, 0.0]


def test_one_token_has_an_empty_rest() -> None:
    acc = accumulate(torch.tensor([[5.0]]), torch.tensor([[0.5]]))
    for name in ("ETA_R", "Q_R", "M_R", "MASS_R"):
        assert field(acc, name).item() == 0.0


def test_log_a_stays_informative_where_the_sums_overflow() -> None:
    acc = accumulate(torch.zeros(1, 2), torch.tensor([[2000.0, 0.0]]))
    assert field(acc, "ETA").item() == math.inf
    assert between(field(acc, "LOG_A").item(), 2000 - math.log(2), 2000 - math.log(2) + 1e-9)


def test_values_that_nearly_agree_keep_their_distance() -> None:
    """The expanded square cancels; what it loses is added back."""
    gen = torch.Generator().manual_seed(5)
    offset = 1e-8 * torch.randn(2, 200, 3, generator=gen, dtype=torch.float64)
    v = 1e3 + offset
    offset = v - 1e3
    logits = torch.randn(200, 2, generator=gen, dtype=torch.float64)
    acc = accumulate(logits, torch.zeros(200, 2), v, torch.zeros(2, 200))
    mean = torch.einsum("hs,shd->hd", torch.softmax(logits, -1), offset)
    distance = (offset - mean).norm(dim=-1).amax(0)
    assert bool((field(acc, "V_RADIUS") >= distance).all())


def test_an_underflowing_weight_is_never_lost() -> None:
    acc = accumulate(torch.tensor([[0.0, -1e4]]), torch.tensor([[0.0, 30.0]]))
    assert field(acc, "ETA").item() > 0.0
    assert field(acc, "M").item() == 30.0


@pytest.mark.parametrize(
    ("logit", "radius"),
    [(math.nan, 1.0), (math.inf, 1.0), (0.0, math.nan), (0.0, -1.0)],
)
def test_what_is_not_a_number_spoils_its_head_only(logit: float, radius: float) -> None:
    logits, c = torch.zeros(2, 3), torch.ones(2, 3)
    logits[1, 1], c[1, 1] = logit, radius
    acc = accumulate(logits, c, torch.ones(3, 1, 2), torch.ones(3, 1))
    assert acc[0].isfinite().all()
    assert acc[1, : AccField.V2].isinf().all()


def test_an_infinite_radius_is_kept_as_such() -> None:
    acc = accumulate(torch.zeros(1, 3), torch.tensor([[0.0, math.inf, 0.0]]))
    for name in ("ETA", "Q", "M", "LOG_A"):
        assert field(acc, name).item() == math.inf


@pytest.mark.parametrize("where", ["v", "rho", "negative", "absent"])
def test_unknown_values_make_the_output_fields_infinite(where: str) -> None:
    v, rho = torch.ones(3, 2, 4), torch.ones(3, 2)
    if where == "v":
        v[1, 1, 0] = math.nan
    elif where == "rho":
        rho[1, 1] = math.inf
    elif where == "negative":
        rho[1, 1] = -1.0
    acc = accumulate(torch.zeros(2, 3), torch.ones(2, 3), v, None if where == "absent" else rho)
    assert acc[1, AccField.V2 :].isinf().all()
    assert acc[0, AccField.V2 :].isinf().all() == (where == "absent")


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="must both be"):
        accumulate(torch.zeros(1, 0), torch.zeros(1, 0))
    with pytest.raises(InputError, match="must both be"):
        accumulate(torch.zeros(1, 3), torch.zeros(1, 2))
    with pytest.raises(InputError, match="do not fit 3 query heads"):
        accumulate(torch.zeros(3, 3), torch.zeros(3, 3), torch.zeros(3, 2, 4), torch.zeros(3, 2))
