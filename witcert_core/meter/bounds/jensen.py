"""The mass-aware bound: how much an attacked set of mass alpha can gain, maximised over alpha.

Let a set of mass ``alpha`` be raised by ``e^c`` and the rest lowered by ``e^-c``. By Jensen the lowered mass
is at least ``(1 - alpha)^2 / sum_rest p~ e^c``, so with ``u = sum_set p~ (e^c - 1)`` and
``N = alpha eta + (1 - 2 alpha) u + u (eta - u)`` the gain is at most ``(1 - alpha) N / (N + 1 - alpha)``.
The bound on the odds ratio is the same for a set and its complement: ``alpha <= 1/2`` suffices. ``u`` is
capped by ``eta``, by ``alpha (e^M - 1)``, by covariance at ``alpha eta + sqrt(alpha (1 - alpha) V)``, and by
the maximiser of ``N``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.meter.bounds.shared import Fields, finish, read, unit_edges


def gain_bound(f: Fields, low: Tensor, high: Tensor, cap: Tensor) -> Tensor:
    """``N`` on the intervals from ``low`` to ``high`` of set masses, all ``[..., I]``, given a bound ``cap`` of ``u``.

    ``N`` is concave in ``u`` with its maximum at ``(1 - 2 alpha + eta) / 2``, hence the last cap.
    """
    eta = (f.eta + f.spare)[..., None]
    slope = 1.0 - 2.0 * low
    u = torch.minimum(cap, 0.5 * (slope + eta)).clamp(min=0.0)
    return high * eta + slope * u + u * (eta - u)


def bound(acc: Tensor) -> Tensor:
    """Float64 ``[...]`` from ``acc [..., 16]``; 1 if unknown."""
    f = read(acc)
    return finish(bound_fields(f), f.vacuous)


def bound_fields(f: Fields) -> Tensor:
    """The same from fields, before its last rounding."""
    edges = 0.5 * unit_edges(f.eta.device)
    low, high = edges[:-1], edges[1:]
    eta, spare = f.eta[..., None], f.spare[..., None]
    variance = (f.q - f.eta_low.square()).clamp(min=0.0)[..., None]
    cap = torch.minimum(eta, high * torch.expm1(f.m)[..., None])
    cap = torch.minimum(cap, high * eta + (high * (1.0 - high) * variance).sqrt()) + spare
    n = gain_bound(f, low, high, cap)
    return ((1.0 - low) * n / (n + 1.0 - low)).amax(dim=-1)
