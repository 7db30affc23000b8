"""Random cells of many shapes, and attacks on them: the largest TV that errors within the radii can reach."""

from __future__ import annotations

import torch
from torch import Tensor

WEIGHT_SHAPES = ("flat", "peaky", "steep", "needle", "two_needles", "sparse")
RADIUS_SHAPES = ("equal", "wide", "one_large", "mostly_zero", "light_large", "heavy_large")
RADIUS_SCALES = (1e-12, 1e-4, 1e-2, 0.1, 0.5, 2.0, 8.0, 30.0)


def total_variation_of_errors(p_tilde: Tensor, eps: Tensor) -> Tensor:
    """TV of ``p ~ p~ e^-eps`` against ``p~``, float64 ``[...]``, to nearly full relative precision.

    A shift common to all errors changes nothing, so they are taken relative to the heaviest token's: then
    even a total variation far below the unit roundoff of ``p~`` is not lost.

    Args:
        p_tilde: ``[..., S]`` compressed weights, summing to 1 within rounding.
        eps: ``[..., S]`` logit errors, compressed minus exact.
    """
    weight, error = p_tilde.to(torch.float64), eps.to(torch.float64)
    heaviest = weight.argmax(dim=-1, keepdim=True)
    change = torch.expm1(error.gather(-1, heaviest) - error)
    drift = (weight * change).sum(dim=-1, keepdim=True) / weight.sum(dim=-1, keepdim=True)
    found = 0.5 * (weight * (change - drift)).abs().sum(dim=-1) / (1.0 + drift.squeeze(-1))
    return found.clamp(max=1.0)  # rounding carries a total variation of 1 past it


def weights(shape: str, cells: int, tokens: int, gen: torch.Generator) -> Tensor:
    """Weights ``[cells, tokens]`` that sum to 1 within rounding."""
    z = torch.randn(cells, tokens, dtype=torch.float64, generator=gen)
    lift = torch.rand(cells, generator=gen, dtype=torch.float64) * 25.0
    if shape == "flat":
        z = z * 0.1
    elif shape == "steep":
        z = z * 6.0
    elif shape == "needle":
        z[:, 0] += lift
    elif shape == "two_needles":
        z[:, 0] += lift
        z[:, -1] += lift - 1.0
    elif shape == "sparse":
        z = torch.where(torch.rand(z.shape, generator=gen) < 0.4, -float("inf"), z)
        z[:, 0] = 0.0
    return torch.softmax(z, dim=-1)


def radii(shape: str, scale: float, p: Tensor, gen: torch.Generator) -> Tensor:
    """Radii of the shape of ``p``, of the order of ``scale``."""
    noise = torch.randn(p.shape, dtype=torch.float64, generator=gen)
    if shape == "equal":
        return torch.full_like(p, scale)
    if shape == "wide":
        return (scale * torch.exp(noise)).clamp(max=37.9)
    if shape == "one_large":
        c = 0.05 * scale * noise.abs()
        return c.scatter(-1, noise.argmax(dim=-1, keepdim=True), scale)
    if shape == "mostly_zero":
        return torch.where(noise > 0.8, scale * noise.abs(), 0.0).clamp(max=37.9)
    rank = p.argsort(dim=-1).argsort(dim=-1).to(torch.float64) / max(p.shape[-1] - 1, 1)
    share = 1.0 - rank if shape == "light_large" else rank
    return scale * (0.02 + share) * (1.0 + 0.1 * noise.abs()).clamp(max=1.2)


def every_cell(cells: int, sizes: tuple[int, ...], seed: int) -> list[tuple[Tensor, Tensor]]:
    """One batch of ``cells`` per weight shape, radius shape, scale and size."""
    gen = torch.Generator().manual_seed(seed)
    batches = []
    for tokens in sizes:
        for weight_shape in WEIGHT_SHAPES:
            for radius_shape in RADIUS_SHAPES:
                for scale in RADIUS_SCALES:
                    p = weights(weight_shape, cells, tokens, gen)
                    batches.append((p, radii(radius_shape, scale, p, gen)))
    return batches


def gain(raised: Tensor, p: Tensor, c: Tensor) -> Tensor:
    """``p(set) - p~(set)`` of the attack that raises the tokens marked in ``raised [..., S]``, ``[...]``."""
    lifted = torch.where(raised, p * torch.exp(c), 0.0).sum(dim=-1)
    lowered = torch.where(raised, 0.0, p * torch.exp(-c)).sum(dim=-1)
    return lifted / (lifted + lowered) - torch.where(raised, p, 0.0).sum(dim=-1)


def best_prefix(p: Tensor, c: Tensor, key: Tensor) -> Tensor:
    """The best of the sets "the first tokens by falling ``key``", as a mask ``[N, S]``."""
    order = key.argsort(dim=-1, descending=True)
    ps, cs = p.gather(-1, order), c.gather(-1, order)
    lifted = (ps * torch.exp(cs)).cumsum(dim=-1)
    lost = ps * torch.exp(-cs)
    lowered = (lost.sum(dim=-1, keepdim=True) - lost.cumsum(dim=-1)).clamp(min=0.0)
    value = lifted / (lifted + lowered).clamp(min=1e-300) - ps.cumsum(dim=-1)
    count = value.argmax(dim=-1, keepdim=True)
    mask = torch.arange(p.shape[-1]) <= count
    return torch.zeros_like(mask).scatter(-1, order, mask)


def ascend(raised: Tensor, p: Tensor, c: Tensor, rounds: int) -> Tensor:
    """Flip the one token that helps most, ``rounds`` times, keeping the set where none does."""
    up, down = p * torch.exp(c), p * torch.exp(-c)
    for _ in range(rounds):
        lifted = torch.where(raised, up, 0.0).sum(dim=-1, keepdim=True)
        lowered = torch.where(raised, 0.0, down).sum(dim=-1, keepdim=True)
        mass = torch.where(raised, p, 0.0).sum(dim=-1, keepdim=True)
        sign = torch.where(raised, -1.0, 1.0)
        new_lifted = (lifted + sign * up).clamp(min=0.0)
        new_lowered = (lowered - sign * down).clamp(min=0.0)
        value = new_lifted / (new_lifted + new_lowered).clamp(min=1e-300) - mass - sign * p
        best, which = value.max(dim=-1, keepdim=True)
        now = lifted / (lifted + lowered).clamp(min=1e-300) - mass
        flip = torch.zeros_like(raised).scatter(-1, which, best > now)
        raised = raised ^ flip
    return raised


def attack(p: Tensor, c: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Largest TV found ``[N]`` and the errors ``[N, S]`` that reach it.

    Threshold sets by several keys, each improved by single flips; then projected gradient ascent inside the
    box from a random start.
    """
    gen = torch.Generator().manual_seed(seed)
    keys = (
        c,
        p,
        -p,
        p * c,
        torch.exp(c) + 0.3 * torch.exp(-c),
        torch.rand(p.shape, generator=gen, dtype=p.dtype),
    )
    best = torch.zeros(p.shape[0], dtype=torch.float64)
    best_eps = torch.zeros_like(p)

    def keep(eps: Tensor) -> None:
        nonlocal best, best_eps
        value = total_variation_of_errors(p, eps)
        better = value > best
        best = torch.where(better, value, best)
        best_eps = torch.where(better[:, None], eps, best_eps)

    for key in keys:
        raised = ascend(best_prefix(p, c, key), p, c, rounds=4)
        keep(torch.where(raised, -c, c))
    eps = c * (2.0 * torch.rand(p.shape, generator=gen, dtype=p.dtype) - 1.0)
    for _ in range(6):
        # d TV / d eps_t = -p_t (1[t raised] - p(raised)); a step of a third of the box, projected onto it.
        new = torch.softmax(p.log() - eps, dim=-1)
        raised = new > p
        slope = -new * (raised.to(p.dtype) - torch.where(raised, new, 0.0).sum(dim=-1, keepdim=True))
        eps = torch.minimum(torch.maximum(eps + slope.sign() * c * (2.0 / 3.0), -c), c)
        keep(eps)
    return best, best_eps


def supremum(p: Tensor, c: Tensor) -> Tensor:
    """Exact supremum for short cells ``[N, S]``, by enumeration of all sets; ``S <= 12``."""
    tokens = p.shape[-1]
    bits = torch.arange(2**tokens)[:, None] >> torch.arange(tokens) & 1
    best = torch.zeros(p.shape[0], dtype=torch.float64)
    for raised in bits.bool():
        best = torch.maximum(best, total_variation_of_errors(p, torch.where(raised, -c, c)))
    return best
