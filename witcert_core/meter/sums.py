"""From logits and radii to the sixteen sums per cell that the bounds are made of.

Sums use ``expm1``: ``A - 1`` and ``A_2 - 2A + 1`` taken as differences lose a third of their value in fp32 at
long context. The heaviest token is kept apart from the rest, which the needle bound needs.
"""

from __future__ import annotations

import math
from enum import IntEnum

import torch
from torch import Tensor

from witcert_core.errors import InputError


class AccField(IntEnum):
    """Fields of one cell's accumulator ``[..., 16]``; sums are over visible tokens with weights ``p~``.

    "Heaviest" is the token ``h`` with the largest weight; fields with ``_R`` are over all the others.
    Every field is rounded outward: up, except ``P_H`` and ``RHO_MIN``, which are rounded down.
    """

    ETA = 0
    """``sum p~ (e^c - 1)``"""
    Q = 1
    """``sum p~ (e^c - 1)^2``"""
    M = 2
    """largest radius"""
    P_H = 3
    """weight of the heaviest token, rounded down"""
    C_H = 4
    """radius of the heaviest token"""
    ETA_R = 5
    Q_R = 6
    M_R = 7
    MASS_R = 8
    """``1 - p_h``, summed, not subtracted"""
    LOG_A = 9
    """``log sum p~ e^c``, unclipped"""
    V2 = 10
    """``sum p~ ||v~||^2``"""
    RHO1 = 11
    """``sum p~ rho``"""
    RHO2 = 12
    """``sum p~ rho^2``"""
    RHO_MAX = 13
    RHO_MIN = 14
    V_RADIUS = 15
    """``max ||v~ - centre||`` for one centre, which is 0 or the attention output"""


NUM_ACC_FIELDS = len(AccField)


SUM_SLACK = {torch.float64: 2.0**-36, torch.float32: 2.0**-12}
"""Relative outward rounding of the sums, by dtype of the accumulator.

A true sum lies in ``[field * (1 - 2 * slack), field]`` (``P_H``: ``[field, field * (1 + 2 * slack)]``). In
float64 it covers up to 2^16 tokens summed in sequence and logits up to 2^12; in float32 the two-level sums
of the kernels.
"""

OUTPUT_FIELDS = (
    AccField.V2,
    AccField.RHO1,
    AccField.RHO2,
    AccField.RHO_MAX,
    AccField.RHO_MIN,
    AccField.V_RADIUS,
)
"""The fields that values and their radii are needed for."""

LEAST_WEIGHT = 1e-60
LEAST_RADIUS = 1e-30
"""Smaller weights, and smaller radii above 0, count as these: no product of two sums underflows."""


def floored_radius(radius: Tensor) -> Tensor:
    """Radii ``[...]`` with every positive one raised to at least :data:`LEAST_RADIUS`."""
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
        float64 ``[H, 16]`` in the order of :class:`~witcert_core.meter.sums.AccField`, rounded outward. A NaN or
        +inf logit, or a NaN or negative radius, makes every field of its head infinite.
    """
    if v is not None and rho is not None:
        return attention_sums(logits, c, v, rho, sink_logits)[0]
    log_p, radius = _log_weights(logits, c, sink_logits)
    return _weight_fields(log_p, radius, None)


def attention_sums(
    logits: Tensor, c: Tensor, v: Tensor, rho: Tensor, sink_logits: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`accumulate`, with the weights ``[H, S]`` (a sink's last) and outputs ``[H, Dv]`` they were made of."""
    log_p, radius = _log_weights(logits, c, sink_logits)
    p = log_p.exp()
    outputs, out = _output_fields(p, v, rho, has_sink=sink_logits is not None)
    return _weight_fields(log_p, radius, outputs), p, out


def _log_weights(logits: Tensor, c: Tensor, sink_logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logarithms of the weights and radii, a sink's last."""
    if logits.dim() != 2 or logits.shape != c.shape or logits.shape[-1] == 0:
        raise InputError(f"logits {tuple(logits.shape)} and radii {tuple(c.shape)} must both be [H, S], S >= 1")
    z, radius = logits.to(torch.float64), c.to(torch.float64)
    if sink_logits is not None:
        z = torch.cat((z, sink_logits.to(torch.float64)[:, None]), dim=-1)
        radius = torch.nn.functional.pad(radius, (0, 1))
    return torch.log_softmax(z, dim=-1), radius


def accumulate_weights(p: Tensor, c: Tensor) -> Tensor:
    """The fields that depend on weights and radii alone; the output fields are infinite.

    Args:
        p: ``[..., S]`` compressed weights, summing to 1 along the last axis.
        c: ``[..., S]`` radii.

    Returns:
        float64 ``[..., 16]``, rounded outward.
    """
    return _weight_fields(p.to(torch.float64).log(), c.to(torch.float64), None)


def heaviest(p: Tensor) -> Tensor:
    """Index ``[..., 1]`` of the token that the fields of :func:`accumulate_weights` keep apart, for ``p [..., S]``.

    Taken from the weights as they are summed: two that differ in their last bit may have changed places in them.
    """
    return _floored(p.to(torch.float64).log()).exp().argmax(dim=-1, keepdim=True)


def _floored(log_p: Tensor) -> Tensor:
    return log_p.clamp(min=math.log(LEAST_WEIGHT))


def _weight_fields(log_p: Tensor, radius: Tensor, outputs: dict[AccField, Tensor] | None) -> Tensor:
    """``[..., 16]`` of the logarithms of the weights; without `outputs` those fields are infinite."""
    log_weight = _floored(log_p)
    weight = log_weight.exp()
    bad = (weight.isnan() | radius.isnan() | (radius < 0)).any(dim=-1)
    radius = floored_radius(radius)
    h = weight.argmax(dim=-1, keepdim=True)
    p_h, c_h = weight.gather(-1, h).squeeze(-1), radius.gather(-1, h).squeeze(-1)
    growth = torch.expm1(radius)
    first = weight * growth
    second = first * growth

    def over_rest(x: Tensor) -> Tensor:
        return x.scatter(-1, h, 0.0)

    up = 1.0 + SUM_SLACK[torch.float64]
    largest = radius.amax(dim=-1)
    eta = first.sum(dim=-1) * up
    # log1p is exact for small radii; logsumexp stays finite where e^c overflows.
    log_a = torch.logsumexp(log_weight + radius, dim=-1)
    fields = {
        AccField.ETA: eta,
        AccField.Q: second.sum(dim=-1) * up,
        AccField.M: largest,
        AccField.P_H: p_h / up,
        AccField.C_H: c_h,
        AccField.ETA_R: over_rest(first).sum(dim=-1) * up,
        AccField.Q_R: over_rest(second).sum(dim=-1) * up,
        AccField.M_R: over_rest(radius).amax(dim=-1),
        AccField.MASS_R: over_rest(weight).sum(dim=-1) * up,
        AccField.LOG_A: torch.where(largest < 1.0, torch.log1p(eta), log_a * up + 2.0**-36),
    }
    fields |= outputs or dict.fromkeys(OUTPUT_FIELDS, torch.full_like(eta, float("inf")))
    acc = torch.stack([fields[field] for field in AccField], dim=-1)
    return acc.masked_fill_(bad[..., None], float("inf"))


def _output_fields(p: Tensor, v: Tensor, rho: Tensor, has_sink: bool) -> tuple[dict[AccField, Tensor], Tensor]:
    """The output fields ``[H]``, infinite where ``v`` or ``rho`` is not finite, and the outputs ``[H, Dv]``."""
    heads, kv_heads = p.shape[0], v.shape[1]
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
    reach = square.T[:, None] + out.square().sum(dim=-1, keepdim=True)
    distance = torch.einsum("kgd,skd->kgs", out, value).mul_(-2.0).add_(reach).clamp_(min=0.0)
    distance = distance.add_(reach, alpha=2.0**-40).sqrt_().nan_to_num_(nan=float("inf"), posinf=float("inf"))
    moments = torch.stack((square, radius, radius.square()), dim=-1)
    v2, rho1, rho2 = (torch.einsum("kgs,skf->kgf", weight, moments) * up).unbind(dim=-1)
    known = (moments.isfinite().all(dim=-1) & (radius >= 0)).all(dim=0)[:, None]
    fields = {
        AccField.V2: v2,
        AccField.RHO1: rho1,
        AccField.RHO2: rho2,
        AccField.RHO_MAX: radius.amax(dim=0)[:, None].expand_as(v2),
        AccField.RHO_MIN: radius.amin(dim=0)[:, None].expand_as(v2),
        AccField.V_RADIUS: distance.amax(dim=-1) * up,
    }
    return {f: torch.where(known, x, float("inf")).reshape(heads) for f, x in fields.items()}, out.flatten(0, 1)


def weighted_values(weights: Tensor, v: Tensor) -> Tensor:
    """``sum p~ v~`` per cell, ``[C, Dv]``, for weights ``[C, S]`` and values ``[S, Hkv, Dv]``."""
    cells, kv_heads = weights.shape[0], v.shape[1]
    grouped = weights.reshape(kv_heads, cells // kv_heads, -1)
    return torch.einsum("kgs,skd->kgd", grouped, v).reshape(cells, -1)
