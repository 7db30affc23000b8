"""From logits and radii to the sixteen sums per cell that the bounds are made of.

Sums use ``expm1``: ``A - 1`` and ``A_2 - 2A + 1`` taken as differences lose a third of their value in fp32 at
long context. The heaviest token is kept apart from the rest, which the needle bound needs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.layout import NUM_ACC_FIELDS, AccField

SUM_SLACK = {torch.float64: 2.0**-36, torch.float32: 2.0**-12}
"""Relative outward rounding of the sums, by dtype of the accumulator.

A true sum lies in ``[field * (1 - 2 * slack), field]`` (``P_H``: ``[field, field * (1 + 2 * slack)]``). In
float64 it covers up to 2^16 tokens summed in sequence and logits up to 2^12; in float32 the two-level sums
of the kernels.
"""

LEAST_WEIGHT = 1e-60
LEAST_RADIUS = 1e-30
"""Smaller weights, and smaller radii above 0, count as these: no product of two sums underflows."""


def floored_radius(radius: Tensor) -> Tensor:
    """Radii with every positive one raised to at least :data:`LEAST_RADIUS`."""
    return torch.where(radius > 0, radius.clamp(min=LEAST_RADIUS), radius)


def accumulate(
    logits: Tensor,
    c: Tensor,
    v: Tensor | None = None,
    rho: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Accumulators of each query head over its visible tokens.

    Args:
        logits: ``[H, S]`` compressed logits, after softcap.
        c: ``[H, S]`` radii, non-negative; infinite where unknown.
        v: ``[S, Hkv, Dv]`` stored values; without them the output fields are infinite.
        rho: ``[S, Hkv]`` bounds on ``||v~ - v||``; without them the output fields are infinite.
        sink_logits: ``[H]``; each is one more token with radius 0 and value 0.

    Returns:
        float64 ``[H, 16]`` in the order of :class:`~witcert_core.layout.AccField`, rounded outward. A NaN or
        +inf logit, or a NaN or negative radius, makes every field of its head infinite.
    """
    if logits.dim() != 2 or logits.shape != c.shape or logits.shape[-1] == 0:
        raise InputError(
            f"logits {tuple(logits.shape)} and radii {tuple(c.shape)} must both be [H, S], S >= 1"
        )
    z, radius = logits.to(torch.float64), c.to(torch.float64)
    if sink_logits is not None:
        z = torch.cat((z, sink_logits.to(torch.float64)[:, None]), dim=-1)
        radius = torch.nn.functional.pad(radius, (0, 1))
    log_p = z - torch.logsumexp(z, dim=-1, keepdim=True)
    acc = accumulate_weights(log_p.exp(), radius, log_p=log_p)
    if v is not None and rho is not None:
        _output_fields(acc, log_p.exp(), v, rho, has_sink=sink_logits is not None)
    return acc


def accumulate_weights(p: Tensor, c: Tensor, log_p: Tensor | None = None) -> Tensor:
    """The fields that depend on weights and radii alone; the output fields are infinite.

    Args:
        p: ``[..., S]`` compressed weights, summing to 1 along the last axis.
        c: ``[..., S]`` radii.
        log_p: ``[..., S]`` their logarithms, if known more exactly.

    Returns:
        float64 ``[..., 16]``, rounded outward.
    """
    weight = p.to(torch.float64)
    radius = c.to(torch.float64)
    log_weight = weight.log() if log_p is None else log_p.to(torch.float64)
    log_weight = log_weight.clamp(min=math.log(LEAST_WEIGHT))
    weight = log_weight.exp()
    bad = (weight.isnan() | radius.isnan() | (radius < 0)).any(dim=-1)
    radius = floored_radius(radius)
    h = weight.argmax(dim=-1, keepdim=True)
    p_h, c_h = weight.gather(-1, h).squeeze(-1), radius.gather(-1, h).squeeze(-1)
    growth = torch.expm1(radius)
    first = weight * growth
    second = first * growth
    rest = torch.ones_like(weight).scatter(-1, h, 0.0) > 0

    def over_rest(x: Tensor) -> Tensor:
        return torch.where(rest, x, 0.0)

    up = 1.0 + SUM_SLACK[torch.float64]
    largest = radius.amax(dim=-1)
    eta = first.sum(dim=-1) * up
    acc = torch.full(
        (*weight.shape[:-1], NUM_ACC_FIELDS), float("inf"), dtype=torch.float64, device=weight.device
    )
    acc[..., AccField.ETA] = eta
    acc[..., AccField.Q] = second.sum(dim=-1) * up
    acc[..., AccField.M] = largest
    acc[..., AccField.P_H] = p_h / up
    acc[..., AccField.C_H] = c_h
    acc[..., AccField.ETA_R] = over_rest(first).sum(dim=-1) * up
    acc[..., AccField.Q_R] = over_rest(second).sum(dim=-1) * up
    acc[..., AccField.M_R] = over_rest(radius).amax(dim=-1)
    acc[..., AccField.MASS_R] = over_rest(weight).sum(dim=-1) * up
    # log1p is exact for small radii; logsumexp stays finite where e^c overflows.
    log_a = torch.logsumexp(log_weight + radius, dim=-1)
    acc[..., AccField.LOG_A] = torch.where(largest < 1.0, torch.log1p(eta), log_a * up + 2.0**-36)
    return torch.where(bad[..., None], float("inf"), acc)


def _output_fields(acc: Tensor, p: Tensor, v: Tensor, rho: Tensor, has_sink: bool) -> None:
    """Fill the output fields of ``acc [H, 16]`` in place; infinite where ``v`` or ``rho`` is not finite."""
    heads, kv_heads = acc.shape[0], v.shape[1]
    if heads % kv_heads or rho.shape != v.shape[:2]:
        raise InputError(
            f"values {tuple(v.shape)} and value radii {tuple(rho.shape)} do not fit {heads} query heads; "
            "they must be [S, Hkv, Dv] and [S, Hkv]"
        )
    value, radius = v.to(torch.float64), rho.to(torch.float64)
    if has_sink:
        value = torch.nn.functional.pad(value, (0, 0, 0, 0, 0, 1))
        radius = torch.nn.functional.pad(radius, (0, 0, 0, 1))
    up = 1.0 + SUM_SLACK[torch.float64]
    weight = p.reshape(kv_heads, heads // kv_heads, -1)
    out = torch.einsum("kgs,skd->kgd", weight, value)
    square = value.square().sum(dim=-1)
    # ||v - o||^2 expanded, to avoid a tensor [H, S, Dv]; what cancels is added back.
    own = out.square().sum(dim=-1)[:, :, None]
    reach = square.T[:, None] + own
    distance = (reach - 2.0 * torch.einsum("kgd,skd->kgs", out, value)).clamp(min=0.0) + reach * 2.0**-40
    distance = distance.sqrt().nan_to_num(nan=float("inf"), posinf=float("inf")).amax(dim=-1)
    fields = {
        AccField.V2: torch.einsum("kgs,sk->kgs", weight, square).sum(dim=-1) * up,
        AccField.RHO1: torch.einsum("kgs,sk->kgs", weight, radius).sum(dim=-1) * up,
        AccField.RHO2: torch.einsum("kgs,sk->kgs", weight, radius.square()).sum(dim=-1) * up,
        AccField.RHO_MAX: radius.amax(dim=0)[:, None].expand(-1, heads // kv_heads),
        AccField.RHO_MIN: radius.amin(dim=0)[:, None].expand(-1, heads // kv_heads),
        AccField.V_RADIUS: distance * up,
    }
    known = square.isfinite().all(dim=0) & radius.isfinite().all(dim=0) & (radius >= 0).all(dim=0)
    for field, x in fields.items():
        acc[:, field] = torch.where(known[:, None], x, float("inf")).reshape(heads)
