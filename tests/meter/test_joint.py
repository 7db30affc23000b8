"""No union over tokens: true on its event, the event no likelier than claimed, tighter than the union."""

import math

import pytest
import torch
from torch import Tensor

from witcert_core.cache.radii import dither_law, radius_dither
from witcert_core.errors import BudgetError, InputError
from witcert_core.meter.bounds import joint, meter
from witcert_core.meter.sums import AccField, accumulate_weights, heaviest
from witcert_core.meter.tv import total_variation
from witcert_core.quantizers.dither import DitherKey, dequantize_int8, dither_vectors, quantize_int8

DELTAS = (1e-1, 1e-4, 1e-9)


def attacked(
    sigma: Tensor, bias: Tensor, delta: float, gen: torch.Generator, steps: int = 250
) -> tuple[Tensor, Tensor, Tensor]:
    """Exact weights and signed errors [C, S] on the edge of the event ``sum p e^(theta y) <= K``, by ascent of TV."""
    theta = math.sqrt(2 * math.log(2 / delta))
    log_k = math.log(2 / delta) + theta**2 / 2
    z = torch.randn(sigma.shape, generator=gen, dtype=torch.float64) * 3 * torch.rand(len(sigma), 1, generator=gen)
    z.requires_grad_()
    share = (0.1 * torch.randn(sigma.shape, generator=gen, dtype=torch.float64)).requires_grad_()
    raised = torch.rand(sigma.shape, generator=gen) < torch.rand(len(sigma), 1, generator=gen)
    sign = torch.where(raised, 1.0, -1.0).to(torch.float64)

    def play() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        log_p = z.log_softmax(-1)
        # sum p (e^(theta y) - 1) = K - 1, shared out by a distribution: every y is at least 0.
        log_grown = (share + log_p.detach()).log_softmax(-1) + log_k + math.log1p(-math.exp(-log_k)) - log_p
        y = torch.logaddexp(log_grown, torch.zeros_like(log_grown)) / theta
        eps = sign * (bias + sigma * y)
        p = log_p.exp()
        return p, eps, y, total_variation(p, (log_p + eps).softmax(-1))

    optimizer = torch.optim.Adam([z, share], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        (-play()[3].sum()).backward()
        optimizer.step()
    with torch.no_grad():
        p, eps, y, tv = play()
        assert (((theta * y).exp() * p).sum(-1) <= math.exp(log_k) * (1 + 1e-9)).all()
        return p, eps, tv


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("size", [1, 2, 3, 40])
def test_no_errors_on_its_event_pass_the_bound(delta: float, size: int) -> None:
    gen = torch.Generator().manual_seed(size)
    cells = 64
    scale = torch.logspace(-4, -0.3, cells, dtype=torch.float64)[:, None]
    sigma = scale * torch.exp(0.7 * torch.randn(cells, size, generator=gen, dtype=torch.float64))
    bias = 0.05 * sigma * torch.rand(cells, size, generator=gen, dtype=torch.float64)
    sigma[::7, 0] = 0.0  # an exact token
    p, eps, tv = attacked(sigma, bias, delta, gen)
    served = (p.log() + eps).softmax(-1)
    certain = (eps.abs() * (1 + torch.rand(eps.shape, generator=gen))).clamp(max=38)
    found = joint.bound(served, sigma, bias, certain, delta)
    usable = eps.abs().amax(-1) <= 38
    assert usable.sum() > cells // 2
    assert (tv[usable] <= found[usable]).all()
    if size == 40:
        assert (found / tv)[usable].median() < 1.6


def dithered(tokens: int, dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [1, D], exact and stored keys [S, 1, D] with one dither row, scales."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 1, dim, generator=gen)
    u = dither_vectors(DitherKey(0, seed), torch.tensor([5]), 0, [0], dim)
    codes, scales = quantize_int8(x, u.expand(tokens, 1, dim))
    return torch.randn(1, dim, generator=gen), x, dequantize_int8(codes, scales, u), scales


def weights_of(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return ((k[:, 0].double() @ q[0].double()) * scale).softmax(-1)


def test_it_fails_no_more_often_than_its_share() -> None:
    delta, failed, draws = 0.5, 0, 400
    for seed in range(draws):
        q, exact, stored, scales = dithered(24, 32, seed)
        law = dither_law(q * 30, scales, 1.0)
        served = weights_of(q * 30, stored, 1.0)
        found = joint.bound(served[None], law.sigma, law.bias, law.certain, delta)
        failed += int(total_variation(weights_of(q * 30, exact, 1.0), served) > found[0])
    assert failed <= delta * draws / 4  # the law's constants are far from tight, and this says so


@pytest.mark.parametrize(("tokens", "gain"), [(256, 0.95), (4096, 0.9)])
def test_it_is_tighter_than_the_union_over_tokens(tokens: int, gain: float) -> None:
    dim, delta = 64, 1e-7
    q, _, stored, scales = dithered(tokens, dim, 3)
    law = dither_law(q, scales, dim**-0.5)
    served = weights_of(q, stored, dim**-0.5)[None]
    union = meter(accumulate_weights(served, radius_dither(q, scales, dim**-0.5, delta, tokens)))[0]
    assert joint.bound(served, law.sigma, law.bias, law.certain, delta)[0] < gain * union[0]


def test_a_heavy_token_is_treated_apart() -> None:
    sigma = torch.full((1, 100), 0.05, dtype=torch.float64)
    p = torch.full((1, 100), 0.001 / 99, dtype=torch.float64)
    p[0, 0] = 0.999
    assert joint.bound(p, sigma, 0 * sigma, 20 * sigma, 1e-6)[0] < 0.002


def test_it_keeps_the_token_apart_that_the_sums_keep_apart() -> None:
    """Weights that differ in their last bit may change places in a logarithm; what `needle` lowers must not."""
    first = 0.4 + 0.2 * torch.rand(50000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = torch.stack([first, torch.nextafter(first, torch.ones_like(first))], dim=-1)
    c = torch.tensor([0.1, 0.2], dtype=torch.float64).expand_as(p)
    apart = heaviest(p)
    assert (apart != p.argmax(-1, keepdim=True)).any()
    assert (accumulate_weights(p, c)[:, AccField.C_H] == c.gather(-1, apart)[:, 0]).all()


def test_exact_tokens_move_nothing() -> None:
    p = torch.rand(3, 9, dtype=torch.float64).softmax(-1)
    nothing = torch.zeros_like(p)
    assert (joint.bound(p, nothing, nothing, nothing, 1e-3) < 1e-9).all()


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -1.0])
@pytest.mark.parametrize("what", ["sigma", "bias", "certain"])
def test_what_is_unknown_has_bound_1(what: str, bad: float) -> None:
    given = {name: torch.full((2, 4), 0.01, dtype=torch.float64) for name in ("sigma", "bias", "certain")}
    given[what][1, 2] = bad
    found = joint.bound(torch.full((2, 4), 0.25, dtype=torch.float64), **given, delta=0.01)
    assert found[0] < 0.2
    assert found[1] == 1


def test_wrong_arguments_are_refused() -> None:
    p = torch.full((1, 4), 0.25, dtype=torch.float64)
    with pytest.raises(InputError, match="one shape"):
        joint.bound(p, p[:, :2], p, p, 0.1)
    with pytest.raises(BudgetError, match="delta is 1"):
        joint.bound(p, p, p, p, 1.0)
