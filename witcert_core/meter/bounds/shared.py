"""What the bounds share: reading accumulators outward, the grid of alpha-intervals, final rounding."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.meter.sums import NUM_ACC_FIELDS, SUM_SLACK, AccField

MAX_RADIUS = 38.0
"""Above it the meter is 1: ``e^76`` still fits float32, and no bound says anything there."""

RESULT_UP = 1.0 + 2.0**-40
"""Outward factor of a bound evaluated in float64 by some fifty operations without cancellation."""


@dataclass(frozen=True)
class Fields:
    """Accumulator fields as float64 ``[...]``, with the lower bounds that variances need."""

    eta: Tensor
    eta_low: Tensor
    q: Tensor
    m: Tensor
    p_h: Tensor
    p_h_up: Tensor
    c_h: Tensor
    eta_r: Tensor
    eta_r_low: Tensor
    q_r: Tensor
    m_r: Tensor
    mass_r: Tensor
    mass_r_low: Tensor
    spare: Tensor
    """What ``sum p~ (e^|eps| - 1)`` may exceed the radii's sums by, all sets together; 0 but for `joint`."""
    vacuous: Tensor
    """bool: some field is NaN or infinite, or the largest radius is beyond :data:`MAX_RADIUS`."""


def read(acc: Tensor) -> Fields:
    """Split ``acc [..., 16]`` (float32 or float64) into fields; vacuous cells are replaced by zeros."""
    if acc.dtype not in SUM_SLACK or acc.shape[-1] != NUM_ACC_FIELDS:
        raise InputError(
            f"accumulators have dtype {acc.dtype} and shape {tuple(acc.shape)}; "
            f"they are float32 or float64 [..., {NUM_ACC_FIELDS}]"
        )
    used = acc[..., : AccField.MASS_R + 1].to(torch.float64)
    vacuous = ~used.isfinite().all(dim=-1) | (used < 0).any(dim=-1) | (used[..., AccField.M] > MAX_RADIUS)
    used = torch.where(vacuous[..., None], 0.0, used)
    down = 1.0 - 2.0 * SUM_SLACK[acc.dtype]
    eta, q, m, p_h, c_h, eta_r, q_r, m_r, mass_r = used.unbind(dim=-1)
    return Fields(
        eta=eta,
        eta_low=eta * down,
        q=q,
        m=m,
        p_h=p_h,
        p_h_up=p_h / down,
        c_h=c_h,
        eta_r=eta_r,
        eta_r_low=eta_r * down,
        q_r=q_r,
        m_r=m_r,
        mass_r=mass_r,
        mass_r_low=mass_r * down,
        spare=torch.zeros_like(eta),
        vacuous=vacuous,
    )


def finish(value: Tensor, vacuous: Tensor, when_vacuous: float = 1.0) -> Tensor:
    """Round ``[...]`` up, and answer vacuous or NaN cells with ``when_vacuous``."""
    return torch.where(vacuous | value.isnan(), when_vacuous, value * RESULT_UP)


@functools.lru_cache(maxsize=8)
def unit_edges(device: torch.device) -> Tensor:
    """Edges of the alpha-intervals scaled to [0, 1], float64: 64 uniform ones, the first split towards 0.

    The first, ``[0, 1/64]``, is split geometrically by factors of 2 down to ``2^-40``. Intervals, never
    points: between points the true supremum can be higher.
    """
    uniform = torch.arange(1, 65, dtype=torch.float64) / 64.0
    geometric = torch.exp2(torch.arange(-40, -6, dtype=torch.float64))
    return torch.cat((torch.zeros(1, dtype=torch.float64), geometric, uniform)).to(device)
