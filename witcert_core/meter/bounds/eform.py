"""``TV <= (A^2 - 1) / 2``, ``A = sum p~ e^c``: the published form. Loose, but its logarithm ranks."""

from __future__ import annotations

from torch import Tensor

from witcert_core.meter.bounds.shared import finish, read


def bound(acc: Tensor) -> Tensor:
    """Unclipped ``eta (2 + eta) / 2``, float64 ``[...]`` from ``acc [..., 16]``; infinite if unknown."""
    f = read(acc)
    return finish(0.5 * f.eta * (2.0 + f.eta), f.vacuous, float("inf"))
