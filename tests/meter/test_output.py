import math

import pytest
import torch
from torch import Tensor

from witcert_core.meter.bounds import meter
from witcert_core.meter.output import output_bound, relative_output_bound
from witcert_core.meter.sums import SUM_SLACK, AccField, accumulate


def outputs(
    logits: Tensor, eps: Tensor, v_stored: Tensor, direction: Tensor, rho: Tensor, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compressed and exact outputs [H, Dv]; exact values are v~ + rho * direction, exact logits z~ - eps."""
    exact_v = v_stored + rho[..., None] * direction
    z, z_exact = logits, logits - eps
    if sink is not None:
        z, z_exact = torch.cat((z, sink[:, None]), -1), torch.cat((z_exact, sink[:, None]), -1)
        zero = torch.zeros_like(v_stored[:1])
        v_stored, exact_v = torch.cat((v_stored, zero)), torch.cat((exact_v, zero))
    compressed = torch.einsum("hs,sd->hd", torch.softmax(z, -1), v_stored[:, 0])
    return compressed, torch.einsum("hs,sd->hd", torch.softmax(z_exact, -1), exact_v[:, 0])


@pytest.mark.parametrize("has_sink", [False, True], ids=["plain", "sink"])
@pytest.mark.parametrize("radius", [1e-9, 0.02, 0.3, 2.0])
@pytest.mark.parametrize("rho_size", [0.0, 0.1, 1.0])
def test_attacked_logits_and_values_stay_within_the_bound(radius: float, rho_size: float, has_sink: bool) -> None:
    """Errors at their limits, pushed along the direction in which they help each other."""
    gen = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    best, reached = math.inf, 0.0
    for tokens in (1, 2, 7, 60):
        logits, v = draw(40, tokens) * 2, draw(tokens, 1, 6) + 2 * draw(1, 1, 6)
        c, rho = radius * draw(40, tokens).abs().clamp(max=3), rho_size * draw(tokens, 1).abs()
        sink = draw(40) if has_sink else None
        acc = accumulate(logits, c, v, rho, sink)
        tv, _ = meter(acc)
        axis = torch.nn.functional.normalize(draw(40, 6), dim=-1)
        for _ in range(3):
            # Raise tokens that lie along the axis; move every value along it as well.
            along = torch.einsum("sd,hd->hs", v[:, 0], axis)
            eps = -c * (along - along.mean(-1, keepdim=True)).sign()
            for head in range(0, 40, 13):
                direction = axis[head].expand_as(v)
                compressed, exact = outputs(logits, eps, v, direction, rho, sink)
                norm = compressed.norm(dim=-1)
                bound = output_bound(acc, tv, norm, has_sink)
                moved = (exact - compressed).norm(dim=-1)
                assert bool((bound >= moved).all())
                best = min(best, float((bound / moved.clamp(min=1e-300)).min()))
                reached = max(reached, float(moved.max()))
                axis[head] = torch.nn.functional.normalize(exact[head] - compressed[head] + 1e-12, dim=-1)
    if radius or rho_size:
        assert reached > 0.0
    if rho_size == 1.0 and radius < 0.1:
        assert best < 1.2  # the value term is tight when nothing else moves


def test_every_form_is_needed_and_the_smallest_is_taken() -> None:
    logits = torch.zeros(1, 4, dtype=torch.float64)
    v = torch.randn(4, 1, 3)
    rho = torch.zeros(4, 1)
    small = accumulate(logits, torch.full((1, 4), 0.01), v, rho)
    large = accumulate(logits, torch.full((1, 4), 5.0), v, rho)
    norm = v[:, 0].double().mean(0).norm()[None]
    for acc in (small, large):
        tv, _ = meter(acc)
        by_mass = tv * 2 * acc[:, AccField.V_RADIUS]
        variance = (v[:, 0].double() - v[:, 0].double().mean(0)).square().sum(-1).mean()
        by_place = tv * acc[:, AccField.V_RADIUS] + (tv * acc[:, AccField.V2]).sqrt()
        q = acc[:, AccField.Q]
        grown = torch.minimum(1 + acc[:, AccField.ETA], 1 / (1 - q).clamp(min=1e-30).sqrt())
        by_variance = grown * q.sqrt() * variance.sqrt()
        expected = torch.minimum(torch.minimum(by_mass, by_place), by_variance)
        torch.testing.assert_close(output_bound(acc, tv, norm), expected, rtol=1e-4, atol=1e-6)
        given = output_bound(acc, tv, norm, spread=variance, moved=0.5 * by_mass)
        by_place = tv * acc[:, AccField.V_RADIUS] + (tv * variance).sqrt()
        expected = torch.minimum(torch.minimum(expected, by_place), 0.5 * by_mass)
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-6)


def test_equal_exact_values_cannot_move() -> None:
    v = torch.ones(5, 1, 3)
    acc = accumulate(torch.randn(1, 5), torch.full((1, 5), 3.0), v, torch.zeros(5, 1))
    bound = output_bound(acc, meter(acc)[0], torch.tensor([3.0**0.5]))
    assert bound.item() < 1e-3


def test_a_sink_brings_the_zero_vector() -> None:
    """Equal values move all the same when weight flows to or from the sink."""
    logits, sink = torch.zeros(1, 3, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    v, rho, c = torch.ones(3, 1, 4), torch.zeros(3, 1), torch.full((1, 3), 0.5, dtype=torch.float64)
    acc = accumulate(logits, c, v, rho, sink)
    compressed, exact = outputs(logits, c, v.double(), v.double(), rho.double(), sink)
    moved = (exact - compressed).norm().item()
    bound = output_bound(acc, meter(acc)[0], compressed.norm(dim=-1), has_sink=True).item()
    assert moved > 0.1
    assert moved <= bound
    # Accumulators of a kernel that leaves the sink out of the radius and of min rho.
    kernel = acc.clone()
    kernel[:, AccField.V_RADIUS] = (v[0, 0].double() - compressed[0]).norm()
    kernel[:, AccField.RHO_MIN] = 0.0
    assert output_bound(kernel, meter(acc)[0], compressed.norm(dim=-1), has_sink=True).item() >= moved


def test_a_token_whose_weight_a_kernel_lost_may_become_the_output() -> None:
    """All weight on a sink, the other token's flushed to 0 and its radius beyond what a float32 growth holds."""
    field = dict(ETA=1e16, Q=1e16, M=300.0, P_H=0.9997, C_H=2.0**-20, ETA_R=1e16, Q_R=1e16, M_R=300.0, MASS_R=2.0**-120)
    acc = torch.zeros(1, len(AccField))
    for name, value in {**field, "LOG_A": 300.0, "V_RADIUS": 5.0}.items():
        acc[0, AccField[name]] = value
    assert float(output_bound(acc, meter(acc)[0], torch.zeros(1), has_sink=True)) >= 5.0


def test_single_precision_accumulators_are_read_with_their_own_slack() -> None:
    """Every sum anywhere within its slack: the bound is never below the one of the exact sums."""
    gen = torch.Generator().manual_seed(3)
    slack = 2 * SUM_SLACK[torch.float32] * (1 - 2.0**-10)
    v, rho = torch.randn(20, 1, 4, generator=gen), 1.0 + 0.01 * torch.rand(20, 1, generator=gen)
    logits = torch.randn(200, 20, generator=gen, dtype=torch.float64)
    acc = accumulate(logits, 0.3 * torch.rand(200, 20, generator=gen), v, rho)
    norm = (torch.softmax(logits, -1) @ v[:, 0].double()).norm(dim=-1)
    far = torch.ones(200)  # leaves the second form alone
    exact = output_bound(acc, far, norm)
    for _ in range(20):
        factor = 1 + slack * torch.rand(acc.shape, generator=gen).round().double()
        kernel = acc * factor * (1 + 2.0**-22)
        kernel[:, AccField.P_H] = acc[:, AccField.P_H] / (1 + slack)
        kernel[:, AccField.RHO_MIN] = acc[:, AccField.RHO_MIN] / (1 + 2.0**-22)
        assert bool((output_bound(kernel.float(), far, norm) >= exact).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("field", ["V2", "RHO1", "RHO_MAX", "V_RADIUS", "norm", "tv"])
def test_the_unknown_is_infinite_or_still_bounded_but_never_nan(field: str, bad: float) -> None:
    acc = accumulate(torch.zeros(1, 4), torch.full((1, 4), 0.1), torch.randn(4, 1, 3), torch.rand(4, 1))
    tv, norm = meter(acc)[0], torch.ones(1)
    clean = output_bound(acc, tv, norm)
    if field == "norm":
        norm = torch.full((1,), bad)
    elif field == "tv":
        tv = torch.full((1,), bad)
    else:
        acc[0, AccField[field]] = bad
    assert output_bound(acc, tv, norm).item() >= clean.item() * 0.999
    assert relative_output_bound(output_bound(acc, tv, norm), norm).item() >= 0.0


@pytest.mark.parametrize(
    ("bound", "norm", "relative"),
    [
        (1.0, 2.0, 0.5),
        (0.0, 0.0, 0.0),
        (1.0, 0.0, math.inf),
        (math.inf, 1.0, math.inf),
        (1.0, math.nan, math.inf),
    ],
)
def test_relative_bound(bound: float, norm: float, relative: float) -> None:
    assert relative_output_bound(torch.tensor([bound]), torch.tensor([norm])).item() == pytest.approx(relative)


def test_absent_values_leave_the_output_unknown() -> None:
    acc = accumulate(torch.zeros(1, 2), torch.full((1, 2), 0.1))
    assert output_bound(acc, meter(acc)[0], torch.ones(1)).item() == math.inf
