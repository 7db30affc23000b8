"""The bound for a cell that looks at one token: the heaviest token ``h`` treated apart.

Simple form: either ``h`` is attacked, and then at most the other tokens' mass ``m`` is lost, or it is not,
and then its weight keeps at least ``p_h e^-c_h`` against ``a_r = m + eta_r``. The second share is never below
``m``, so it bounds both.

Refined form, ``alpha`` the mass of a set within the rest, ``u`` its ``sum p~ (e^c - 1)``:

* ``h`` attacked, the set is the complement: the gain is ``alpha N / (alpha + N)`` with jensen's ``N``.
* ``h`` not attacked, the set is raised: the lowered mass falls by
  ``w = p_h (1 - e^-c_h) + b e / (b + e)``, ``b = m - alpha``, ``e = eta_r - u`` (Jensen on the rest); the
  gain is ``((1 - alpha) u + alpha w) / (1 + u - w)``.

Both are sums of non-negative terms: written as a difference of two weights, an interval would lose its own
width. In both, ``u <= min(eta_r, alpha (e^M_r - 1), alpha eta_r / m + sqrt(alpha (m - alpha) V_r / m))``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.meter.bounds.jensen import gain_bound
from witcert_core.meter.bounds.shared import Fields, finish, read, unit_edges


def bound(acc: Tensor) -> Tensor:
    """Float64 ``[...]`` from ``acc [..., 16]``; 1 if unknown."""
    f = read(acc)
    return finish(bound_fields(f), f.vacuous)


def bound_fields(f: Fields) -> Tensor:
    """The same from fields, before its last rounding."""
    return torch.minimum(_simple(f), _refined(f))


def _simple(f: Fields) -> Tensor:
    raised = f.mass_r + f.eta_r + f.spare
    kept = f.p_h * torch.exp(-f.c_h)
    share = raised / (raised + kept)
    # 0/0: nothing beside h and h's own weight underflowed.
    return torch.where(raised + kept > 0, share, 1.0)


def _refined(f: Fields) -> Tensor:
    edges = unit_edges(f.eta.device)
    # Fractions of the true m, so that alpha / m is exact; alpha itself is only known between two bounds.
    part0, part1 = edges[:-1], edges[1:]
    m_up, m_low = f.mass_r[..., None], f.mass_r_low[..., None]
    low, high = part0 * m_low, part1 * m_up
    eta_r = f.eta_r[..., None]
    m_variance = (f.mass_r * f.q_r - f.eta_r_low.square()).clamp(min=0.0)[..., None]
    cap = torch.minimum(eta_r, high * torch.expm1(f.m_r)[..., None])
    # Not monotone in the fraction beyond 1/2, but where it falls it exceeds eta_r, the other cap.
    cap = torch.minimum(cap, part1 * eta_r + (part1 * (1.0 - part1) * m_variance).sqrt()) + f.spare[..., None]
    n = gain_bound(f, low, high, cap)
    attacked = torch.where(high > 0, high * n / (high + n), 0.0)
    # b = m - alpha enters numerator and denominator; taking it from below in both costs at most this factor.
    b_slack = torch.where(m_low > 0, m_up / m_low, 1.0)
    spared = _spared(f, low, high, cap, m_low - low) * b_slack
    return torch.maximum(attacked, spared).amax(dim=-1)


def _spared(f: Fields, low: Tensor, high: Tensor, cap: Tensor, b: Tensor) -> Tensor:
    """Largest gain of a set in the rest while ``h`` is lowered, per interval ``[..., I]``.

    With ``t = b + e`` the gain is ``(P t - k t^2 - high b^2) / (R t - t^2 + b^2)``, ``k = 1 - low``. Its
    slope in ``t`` has the sign of a quadratic that is positive at 0, so the first positive root is the only
    interior maximum: both ends of ``u`` and this root are evaluated.
    """
    eta_r = (f.eta_r + f.spare)[..., None]
    kept = (f.p_h * torch.exp(-f.c_h))[..., None] + low
    fall = (f.p_h_up * -torch.expm1(-f.c_h))[..., None]
    k = 1.0 - low

    def gain(e: Tensor) -> Tensor:
        u = eta_r - e
        t = b + e
        inverse = torch.where(t > 0, 1.0 / t, 0.0)
        total = kept + u + b * b * inverse
        # An empty total means that every weight underflowed: nothing is known.
        return torch.where(total > 0, (k * u + high * (fall + b * e * inverse)) / total, 1.0)

    p = k * (b + eta_r) + high * (fall + b)
    r = kept + b + eta_r
    lead = high * (fall + b) - k * kept
    middle = (k + high) * b
    tail = p + high * r
    root = (middle.square() - lead * tail).clamp(min=0.0).sqrt()
    t = torch.where(middle + root > 0, b * tail / (middle + root), 0.0)
    e_min = eta_r - cap
    inside = torch.minimum(torch.maximum(t - b, e_min), eta_r)
    return torch.maximum(torch.maximum(gain(eta_r), gain(e_min)), gain(inside))
