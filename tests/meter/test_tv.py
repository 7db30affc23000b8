from decimal import Decimal, localcontext

import pytest
import torch
from cell_makers import total_variation_of_errors

from witcert_core.meter.tv import attention_logits, softmax_with_sink, total_variation


def tv_in_decimals(p: list[float], eps: list[float]) -> float:
    """TV of the normalised weights against those moved by the errors, to fifty digits."""
    with localcontext() as context:
        context.prec = 60
        weight = [Decimal(x) for x in p]
        moved = [w * (-Decimal(e)).exp() for w, e in zip(weight, eps, strict=True)]
        total, after = sum(weight), sum(moved)
        return float(sum(abs(m / after - w / total) for m, w in zip(moved, weight, strict=True)) / 2)


@pytest.mark.parametrize("lift", [0.0, 5.0, 30.0, 60.0])
@pytest.mark.parametrize("scale", [1e-14, 1e-6, 0.3, 20.0])
def test_tiny_distances_keep_their_precision(lift: float, scale: float) -> None:
    gen = torch.Generator().manual_seed(0)
    for tokens in (1, 2, 9):
        z = torch.randn(tokens, generator=gen, dtype=torch.float64)
        z[0] += lift
        p, eps = torch.softmax(z, -1), scale * torch.randn(tokens, generator=gen, dtype=torch.float64)
        exact = tv_in_decimals(p.tolist(), eps.tolist())
        assert total_variation_of_errors(p, eps).item() == pytest.approx(exact, rel=1e-11, abs=1e-300)
        # ... also when rounding left the weights' sum beside 1.
        assert total_variation_of_errors(p * (1 + 3e-16), eps).item() == pytest.approx(exact, rel=1e-11, abs=1e-300)


def test_the_plain_distance_agrees_where_it_can() -> None:
    p = torch.softmax(torch.randn(20, 30, dtype=torch.float64), -1)
    eps = torch.randn(20, 30, dtype=torch.float64)
    moved = torch.softmax(p.log() - eps, -1)
    torch.testing.assert_close(total_variation(moved, p), total_variation_of_errors(p, eps))


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_logits_of_grouped_heads(cap: float) -> None:
    q, k = torch.randn(6, 8), torch.randn(5, 2, 8)
    z = attention_logits(q, k, 0.3, cap)
    for head in range(6):
        plain = 0.3 * (k[:, head // 3] @ q[head])
        torch.testing.assert_close(z[head], cap * torch.tanh(plain / cap) if cap else plain)


def test_a_sink_takes_its_share() -> None:
    weights = softmax_with_sink(torch.zeros(2, 3), torch.tensor([0.0, -100.0]))
    torch.testing.assert_close(weights[0], torch.full((4,), 0.25))
    torch.testing.assert_close(weights[1, :3], torch.full((3,), 1 / 3))
