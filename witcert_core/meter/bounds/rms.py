"""``TV <= A sqrt(Q) / 2``, ``Q = sum p~ (e^c - 1)^2``: Cauchy-Schwarz on the weights' relative change."""

from __future__ import annotations

from torch import Tensor

from witcert_core.meter.bounds.shared import finish, read


def bound(acc: Tensor) -> Tensor:
    """Unclipped, float64 ``[...]`` from ``acc [..., 16]``; infinite if unknown."""
    f = read(acc)
    return finish(0.5 * (1.0 + f.eta) * f.q.sqrt(), f.vacuous, float("inf"))
