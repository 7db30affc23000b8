"""The probabilistic tier without a union over tokens: one event for all of a cell's tokens, weighed by exact attention.

The union bound pays ``ln(2 S / delta)`` because it holds each of ``S`` tokens to its own radius. The *exact* weights
``p`` do not depend on the dither, so one expectation covers them all. With ``|eps_t| <= b_t + sigma_t y_t``,
``b_t`` certain and ``E e^(l sigma_t y_t) <= 2 e^(l^2 sigma_t^2 / 2)`` for every ``l``, Markov's inequality gives, for a
``theta`` fixed beforehand and whatever the dependence between tokens,

    ``sum p_t e^(theta y_t) <= K = (2 / delta) e^(theta^2 / 2)``  with probability at least ``1 - delta``.

Only the served weights ``p~_t = p_t e^eps_t / Z`` are at hand. But ``e^eps_t <= e^(b_t + sigma_t y_t)`` and
``1 / Z = sum p~ e^-eps <= A = sum p~ e^|eps|``, so on the same event

    ``sum p~_t x_t <= 1``,  ``x_t = e^((theta - sigma_t) y_t - b_t) / (K A)``.

In terms of ``x`` a token's error is ``e^|eps_t| <= e^(b_t + c_t) x_t^s_t`` with
``s_t = sigma_t / (theta - sigma_t) <= 1`` and ``c_t = s_t (ln K + ln A + b_t)``, and a concave power lies below each
of its tangents: ``e^|eps_t| <= g_t + mu x_t``, the slope ``mu > 0`` of all tangents alike and ``g_t`` what is left at
``x = 0``. Over any set of tokens therefore ``sum p~ e^|eps| <= sum p~ g + mu``: what the radii ``ln g_t`` give, and
``mu`` once for all sets together, which is what `Fields.spare` means to `jensen` and `needle`. ``A`` itself is bounded
so, from the certain radii down. ``S`` does not occur; with equal scales the radius is ``sigma sqrt(2 ln(2 / delta))``
and a little.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from witcert_core.errors import BudgetError, InputError
from witcert_core.meter.bounds import jensen, needle
from witcert_core.meter.bounds.shared import MAX_RADIUS, Fields, finish, read
from witcert_core.meter.sums import accumulate_weights, heaviest

_SHARE = 0.75
"""``mu`` as a share of the mean slope at ``x = 1``; any positive one is sound, this one is near the best."""
_ROUNDS = 12
"""Each replaces the bound on ``A`` by a smaller one; any number is sound."""
_UP, _LEAST = 1.0 + 2.0**-36, 2.0**-36
"""Cover the float64 rounding of a logarithm, an exponential and a sum here: relative, and of logarithms near 0."""


def bound(p: Tensor, sigma: Tensor, bias: Tensor, certain: Tensor, delta: float) -> Tensor:
    """Bound on TV that holds with probability ``1 - delta`` for queries that do not depend on the dither.

    Args:
        p: ``[..., S]`` compressed weights, summing to 1 along the last axis.
        sigma: ``[..., S]`` root of each logit's sub-Gaussian proxy; 0 for a token without error (sink, repaired).
        bias: ``[..., S]`` certain part of each logit's error, beside the sub-Gaussian one.
        certain: ``[..., S]`` radii that hold whatever was drawn.
        delta: probability this cell may spend, in (0, 1).

    Returns:
        float64 ``[...]`` in [0, 1]; 1 where anything is unknown or the law says nothing.

    Raises:
        InputError: shapes that differ.
        BudgetError: delta outside (0, 1).
    """
    if not p.shape == sigma.shape == bias.shape == certain.shape or p.shape[-1] == 0:
        raise InputError(
            f"weights {tuple(p.shape)}, sigma {tuple(sigma.shape)}, bias {tuple(bias.shape)} and certain radii "
            f"{tuple(certain.shape)} must have one shape with at least one token"
        )
    if not 0.0 < delta < 1.0:
        raise BudgetError(f"delta is {delta}; it must lie strictly between 0 and 1")
    theta = math.sqrt(2.0 * math.log(2.0 / delta))
    log_k = (math.log(2.0 / delta) + 0.5 * theta * theta) * _UP
    weight, sure = p.to(torch.float64), certain.to(torch.float64)
    spread, offset = sigma.to(torch.float64), bias.to(torch.float64)
    usable = ((spread >= 0) & (spread <= 0.5 * theta) & (offset >= 0) & (sure >= 0) & (sure <= MAX_RADIUS)).all(-1)
    usable &= (weight >= 0).all(-1) & (offset <= MAX_RADIUS).all(-1)
    spread, offset, sure = (torch.where(usable[..., None], x, 0.0) for x in (spread, offset, sure))
    slope = spread / (theta - spread)
    log_a = ((weight.log() + sure).logsumexp(-1) * _UP + _LEAST).clamp(min=0.0)
    for _ in range(_ROUNDS):
        radius, spare = _tangents(weight, slope, offset, sure, log_k, log_a)
        total = (weight * radius.exp()).sum(-1) + spare
        log_a = torch.minimum(log_a, (total.log() * _UP + _LEAST).clamp(min=0.0))
    every = _fields(weight, *_tangents(weight, slope, offset, sure, log_k, log_a))
    h = heaviest(weight)
    # The heaviest token by itself: p~_h x_h <= 1. The tangents of the others then need not mind it.
    alone = (offset + slope * (log_k + log_a[..., None] + offset - weight.log())).gather(-1, h) * _UP
    radius, spare = _tangents(weight.scatter(-1, h, 0.0), slope, offset, sure, log_k, log_a)
    apart = _fields(weight, radius.scatter(-1, h, torch.minimum(alone, sure.gather(-1, h))), spare)
    best = torch.minimum(jensen.bound_fields(every), needle.bound_fields(apart))
    return finish(best, every.vacuous | apart.vacuous | ~usable).clamp(max=1.0)


def _fields(weight: Tensor, radius: Tensor, spare: Tensor) -> Fields:
    return replace(read(accumulate_weights(weight, radius)), spare=spare)


def _tangents(
    weight: Tensor, slope: Tensor, offset: Tensor, sure: Tensor, log_k: float, log_a: Tensor
) -> tuple[Tensor, Tensor]:
    """Radii ``ln g [..., S]``, none above the certain one or below 0, and ``mu [...]``, rounded up."""
    c = slope * (log_k + log_a[..., None] + offset)
    log_mu = _SHARE * (weight * slope * (offset + c).exp()).sum(-1)
    log_mu = log_mu.clamp(min=1e-300).log()
    # The tangent of e^(b + c) x^s with slope mu touches at x = (s e^(b + c) / mu)^(1 / (1 - s)).
    touch = (torch.xlogy(slope, slope) + slope * (offset + c - log_mu[..., None])) / (1.0 - slope)
    left = torch.where(slope < 1.0, offset + c + touch + torch.log1p(-slope), sure)
    left = left.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=0.0).clamp(min=0.0)
    return torch.minimum(left * _UP, sure), log_mu.exp() * _UP
