"""The output bound that knows directions is never passed, whichever way the errors of logits and values point."""

import math

import pytest
import torch
from cell_makers import every_cell
from torch import Tensor

from witcert_core.meter import directional
from witcert_core.meter.bounds import meter
from witcert_core.meter.output import output_bound
from witcert_core.meter.sums import AccField, attention_sums


def pushed(p: Tensor, c: Tensor, off: Tensor, u: Tensor) -> Tensor:
    """The furthest that weights within their radii bring ``<u, sum p off>``, [C]: by the exact corner for u."""
    x = torch.einsum("csd,cd->cs", off, u)
    order = x.argsort(dim=-1, descending=True)
    p, c, x = (y.gather(-1, order) for y in (p, c, x))
    raised, lowered = p * c.exp(), p * (-c).exp()
    above = torch.nn.functional.pad(raised.cumsum(-1), (1, 0))
    gain = torch.nn.functional.pad((raised * x).cumsum(-1), (1, 0))
    below = lowered.sum(-1, keepdim=True) - torch.nn.functional.pad(lowered.cumsum(-1), (1, 0))
    loss = (lowered * x).sum(-1, keepdim=True) - torch.nn.functional.pad((lowered * x).cumsum(-1), (1, 0))
    return ((gain + loss) / (above + below)).amax(-1)


def attacked(p: Tensor, c: Tensor, v: Tensor, rho: Tensor, out: Tensor, gen: torch.Generator) -> Tensor:
    """The largest distance [C] found over directions, each token's value pushed along it."""
    off = torch.cat((v, torch.zeros_like(v[:1])))[: p.shape[1]] - out[:, None]
    reach = torch.nn.functional.pad(rho, (0, p.shape[1] - len(rho)))
    best = torch.zeros(len(p), dtype=torch.float64)
    for trial in range(8):
        u = torch.randn(out.shape, generator=gen, dtype=torch.float64)
        if trial % 2:  # along the way that tokens pull together
            for _ in range(6):
                signs = torch.einsum("csd,cd->cs", off, u).sign()
                u = torch.einsum("csd,cs->cd", off, signs * p * torch.sinh(c.clamp(max=30)))
                u = torch.nn.functional.normalize(u + 1e-200, dim=-1)
        u = torch.nn.functional.normalize(u, dim=-1)
        along = torch.einsum("csd,cd->cs", off, u) + reach
        best = torch.maximum(best, pushed(p, c, along[..., None], torch.ones(len(p), 1, dtype=torch.float64)))
    return best


@pytest.mark.parametrize("whole", [256, 2], ids=["all directions", "two directions"])
@pytest.mark.parametrize("has_sink", [False, True], ids=["plain", "sink"])
def test_no_direction_of_the_errors_passes_the_bound(
    has_sink: bool, whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directional, "WHOLE_TOKENS", whole)
    gen = torch.Generator().manual_seed(5)
    closest, finite, cells = 0.0, 0, 0
    for number, (p, c) in enumerate(every_cell(2, (2, 7, 30), seed=21)):
        tokens = p.shape[-1]
        z = p.clamp(min=1e-40).log()
        v = torch.randn(tokens, 1, 5, generator=gen, dtype=torch.float64)
        v = v * torch.rand(tokens, 1, 1, generator=gen, dtype=torch.float64) ** (number % 4)
        v = v + (0.0, 3.0)[number % 2]
        rho = 0.2 * torch.rand(tokens, 1, generator=gen, dtype=torch.float64) * (number % 3)
        sink = torch.full((len(p),), -1.0, dtype=torch.float64) if has_sink else None
        acc, weights, out = attention_sums(z, c, v, rho, sink)
        found = directional.moved(weights, c, v, rho, out)
        radii = torch.nn.functional.pad(c, (0, int(has_sink)))
        truth = attacked(weights, radii, v[:, 0], rho[:, 0], out, gen)
        bound = found + acc[:, AccField.RHO1]
        assert bool((truth <= bound + 1e-12).all())
        norm = out.norm(dim=-1)
        spread = acc[:, AccField.V2] - norm.square() * (1 - 2.0**-30)
        reported = output_bound(acc, meter(acc)[0], norm, has_sink, spread, found)
        assert bool((truth <= reported + 1e-12).all())
        assert not bool(found.isnan().any())
        known = found.isfinite() & (truth > 1e-9)
        closest = max(closest, float((truth / bound)[known].max())) if bool(known.any()) else closest
        finite, cells = finite + int(found.isfinite().sum()), cells + len(p)
    assert closest > 0.7
    assert finite > 0.5 * cells


def test_directions_are_worth_more_than_a_variance() -> None:
    """Values that point everywhere: no direction holds more than a small part of their variance."""
    gen = torch.Generator().manual_seed(3)
    z, c = torch.zeros(4, 512, dtype=torch.float64), torch.full((4, 512), 0.4, dtype=torch.float64)
    v = torch.randn(512, 2, 64, generator=gen, dtype=torch.float64)
    rho = torch.zeros(512, 2)
    acc, weights, out = attention_sums(z, c, v, rho)
    tv, norm = meter(acc)[0], out.norm(dim=-1)
    plain = output_bound(acc, tv, norm)
    known = output_bound(acc, tv, norm, moved=directional.moved(weights, c, v, rho, out))
    assert bool((known < 0.6 * plain).all())


def test_the_largest_eigenvalue_is_bounded_from_above_and_closely() -> None:
    gen = torch.Generator().manual_seed(4)
    for rank in (1, 3, 64, 500):
        x = torch.randn(10, rank, 64, generator=gen, dtype=torch.float64) * 10.0 ** torch.randint(-8, 8, (10, 1, 1))
        m = x.transpose(-1, -2) @ x
        exact, bound = torch.linalg.eigvalsh(m)[:, -1], directional.spectral(m)
        assert bool((exact <= bound).all())
        assert bool((bound <= 64**0.125 * exact).all())
    assert float(directional.spectral(torch.zeros(1, 4, 4, dtype=torch.float64))) == 0.0


@pytest.mark.parametrize("what", ["radius", "value", "value radius"])
def test_what_is_not_known_gives_no_bound(what: str) -> None:
    c = torch.full((2, 5), 0.1, dtype=torch.float64)
    v, rho = torch.ones(5, 1, 3, dtype=torch.float64), torch.zeros(5, 1, dtype=torch.float64)
    if what == "radius":
        c[0, 2] = math.inf
    elif what == "value":
        v[2, 0, 1] = math.nan
    else:
        rho[2] = math.inf
    weights = torch.full((2, 5), 0.2, dtype=torch.float64)
    found = directional.moved(weights, c, v, rho, weights @ v[:, 0])
    assert found[0].item() == math.inf
    assert found[1].isfinite().item() is (what == "radius")
