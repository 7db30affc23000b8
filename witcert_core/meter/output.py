"""From total variation to the distance between exact and compressed attention outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.meter.bounds.shared import MAX_RADIUS, RESULT_UP
from witcert_core.meter.sums import SUM_SLACK, AccField


def output_bound(
    acc: Tensor,
    tv: Tensor,
    o_norm: Tensor,
    has_sink: bool = False,
    spread: Tensor | None = None,
    moved: Tensor | None = None,
) -> Tensor:
    """Absolute bound on ``||o - o~||``: ``X + sum p~ rho``, ``X`` the smallest of

    * ``TV (diam(v~) + max rho - min rho)``, where a sink adds the vector 0 and the radius 0 to the set;
    * ``TV (R + max rho - min rho) + sqrt(TV E)``, where no value is further than ``R`` from some centre, and the mean
      square of these distances is ``E``: what weight moves *from* lies where the weights p~ are;
    * ``sqrt(Q) min(A, 1 / sqrt(1 - Q)) (sqrt(sum p~ ||v~||^2 - ||o~||^2) + sqrt(sum p~ rho^2 - (sum p~ rho)^2))``.
      Without the second root it is wrong: the weights move towards tokens whose value radius is larger. Kernels hold
      no growth beyond ``e^80``, so this form says nothing where a radius is above :data:`MAX_RADIUS`;
    * ``moved``, of `directional.moved`.

    Args:
        acc: ``[..., 16]`` accumulators with their output fields. ``V_RADIUS`` is around 0 or around ``o~``.
        tv: ``[...]`` a bound on TV from the same weights and radii.
        o_norm: ``[...]`` at most ``||o~||`` of the same weights, sink included, or that to the slack of ``acc``.
        has_sink: a learned sink takes part.
        spread: ``[...]`` at least ``E`` for the centre of ``V_RADIUS``; by default ``sum p~ ||v~||^2``, which is for
            either.
        moved: ``[...]``; infinite where it is not known.

    Returns:
        float64 ``[...]``, rounded up; +inf where anything is unknown, never NaN.
    """
    slack = SUM_SLACK[acc.dtype]
    field = acc.to(torch.float64)
    down = 1.0 - 2.0 * slack
    norm, tv = o_norm.to(torch.float64), tv.to(torch.float64)
    radius, rho_min = field[..., AccField.V_RADIUS], field[..., AccField.RHO_MIN]
    if has_sink:
        radius, rho_min = torch.maximum(radius, norm), torch.zeros_like(rho_min)
    ranged = field[..., AccField.RHO_MAX] - rho_min
    mean_square = field[..., AccField.V2] if spread is None else spread.to(torch.float64)
    by_mass = tv * (2.0 * radius + ranged)
    by_place = tv * (radius + ranged) + (tv * mean_square).sqrt()

    rho1, rho2 = field[..., AccField.RHO1], field[..., AccField.RHO2]
    spread_v = (field[..., AccField.V2] - (norm * down).square()).clamp(min=0.0).sqrt()
    spread_rho = (rho2 - (rho1 * down).square()).clamp(min=0.0).sqrt()
    q = field[..., AccField.Q]
    left = torch.where(q < 1.0, 1.0 / (1.0 - q).clamp(min=1e-300).sqrt(), float("inf"))
    by_variance = torch.minimum(1.0 + field[..., AccField.ETA], left) * q.sqrt() * (spread_v + spread_rho)
    by_variance = torch.where(field[..., AccField.M] <= MAX_RADIUS, by_variance, float("inf"))

    least = torch.full_like(norm, float("inf"))
    for form in (by_mass, by_place, by_variance, moved):
        if form is not None:
            least = torch.minimum(least, form.to(torch.float64).nan_to_num(nan=float("inf")))
    total = torch.where(norm.isfinite(), (least + rho1) * RESULT_UP, float("inf"))
    return total.nan_to_num(nan=float("inf"), posinf=float("inf"))


def relative_output_bound(absolute: Tensor, o_norm: Tensor) -> Tensor:
    """``absolute / ||o~||``, float64 ``[...]``: 0 where both are 0, +inf where the norm is 0 or unknown."""
    bound, norm = absolute.to(torch.float64), o_norm.to(torch.float64)
    ratio = bound / norm * RESULT_UP
    ratio = torch.where((norm == 0) & (bound == 0), 0.0, ratio)
    return torch.where(norm.isfinite(), ratio, float("inf")).nan_to_num(nan=float("inf"), posinf=float("inf"))
