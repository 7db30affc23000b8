"""The exact supremum of TV over ``|eps| <= c`` when tokens may be divided: sort and sweep.

The worst attack raises the tokens with the largest radii and lowers the rest, splitting at most one. With
``alpha``, ``beta`` the masses on both sides, ``u = sum_raised p~ (e^c - 1)`` and
``w = sum_lowered p~ (1 - e^-c)``, the gain is
``(u beta + alpha w) / ((alpha + u + beta - w)(alpha + beta))``: non-negative terms only, so even a tiny
supremum is found to full relative precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.meter.bounds.shared import MAX_RADIUS
from witcert_core.meter.sums import LEAST_WEIGHT, floored_radius


def bound(p: Tensor, c: Tensor) -> Tensor:
    """Supremum of TV, rounded up.

    Args:
        p: ``[..., S]`` compressed weights; normalised here if they do not sum to 1.
        c: ``[..., S]`` radii.

    Returns:
        float64 ``[...]``; 1 where a radius is NaN, negative or above 38, or a weight is not finite.
    """
    if p.shape != c.shape or p.shape[-1] == 0:
        raise InputError(
            f"weights {tuple(p.shape)} and radii {tuple(c.shape)} must have one shape with at least one token"
        )
    weight, radius = p.to(torch.float64), c.to(torch.float64)
    usable = (weight.isfinite() & (weight >= 0) & (radius >= 0) & (radius <= MAX_RADIUS)).all(dim=-1)
    usable &= weight.sum(dim=-1) > 0
    radius = floored_radius(torch.where(usable[..., None], radius, 0.0))
    weight = torch.where(usable[..., None], weight, 1.0)
    weight = weight.clamp(min=LEAST_WEIGHT * weight.sum(dim=-1, keepdim=True))
    radius, order = radius.sort(dim=-1, descending=True)
    weight = weight.gather(-1, order)
    grow, shrink = torch.expm1(radius), -torch.expm1(-radius)

    zero = torch.zeros_like(weight[..., :1])

    def before(x: Tensor) -> Tensor:
        return torch.cat((zero, x[..., :-1].cumsum(dim=-1)), dim=-1)

    def after(x: Tensor) -> Tensor:
        return torch.cat((x[..., 1:].flip(-1).cumsum(dim=-1).flip(-1), zero), dim=-1)

    lost = weight * torch.exp(-radius)
    alpha, u = before(weight), before(weight * grow)
    beta, w, kept = after(weight), after(weight * shrink), after(lost)
    part = _split(weight, lost, grow, shrink, alpha, beta, u, w, kept)
    rest = 1.0 - part
    alpha, u = alpha + part * weight, u + part * weight * grow
    beta, w, kept = beta + rest * weight, w + rest * weight * shrink, kept + rest * lost
    gain = (u * beta + alpha * w) / ((alpha + u + kept) * (alpha + beta))
    # Running sums over S tokens are off by at most S units in the last place, five of them meet here.
    up = 1.0 + (8 * weight.shape[-1] + 64) * 2.0**-53
    return torch.where(usable, gain.amax(dim=-1) * up, 1.0)


def _split(
    weight: Tensor,
    lost: Tensor,
    grow: Tensor,
    shrink: Tensor,
    alpha: Tensor,
    beta: Tensor,
    u: Tensor,
    w: Tensor,
    kept: Tensor,
) -> Tensor:
    """Best share of each token to raise, when all before it are raised and all after it lowered.

    The gain ``(a + x b)/(d + x e) - alpha - x m`` is concave in the share ``x``, stationary where
    ``(d + x e)^2 = T (e^c y + a e^-c)``, ``T = alpha + beta`` with the token, ``y`` with all of it lowered.
    ``d^2`` is taken off before the root, so that tiny radii do not cancel.
    """
    a = alpha + u
    y = kept + lost
    d = a + y
    mass = alpha + beta + weight
    excess = w + weight * shrink - u
    drift = y * grow - a * shrink
    slope = weight * (grow + shrink)
    root = (mass * (d + drift)).clamp(min=0.0).sqrt()
    share = (d * excess + mass * drift) / (slope * (root + d))
    return torch.where(slope > 0, share, 0.0).nan_to_num(nan=0.0).clamp(0.0, 1.0)
