"""``TV <= tanh(M / 2)``, ``M`` the largest radius: exact only for equal radii and one critical mass."""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.meter.bounds.shared import finish, read


def bound(acc: Tensor) -> Tensor:
    """Float64 ``[...]`` from ``acc [..., 16]``; 1 if unknown."""
    f = read(acc)
    return finish(torch.tanh(0.5 * f.m), f.vacuous)
