"""Six upper bounds on the total variation between exact and compressed attention, one file each.

Each takes a cell's accumulators and returns a value that is never below the truth; ``extremal`` takes all
weights and radii instead, and is the supremum itself for divisible tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from witcert_core.meter.bounds import eform, extremal, jensen, needle, rms, tanh

FORM_NAMES: tuple[str, ...] = ("eform", "tanh", "rms", "jensen", "needle", "extremal")
"""Names by form index, as reported."""

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "eform": eform.bound,
    "tanh": tanh.bound,
    "rms": rms.bound,
    "jensen": jensen.bound,
    "needle": needle.bound,
}
"""Forms of accumulators, ``acc [..., 16] -> [...]``; ``extremal.bound(p, c)`` is apart."""

METER_FORMS: tuple[str, ...] = ("tanh", "jensen", "needle")
"""Forms whose minimum, with 1, is the meter."""


def meter(acc: Tensor) -> tuple[Tensor, Tensor]:
    """``min(1, tanh, jensen, needle)`` and the index in :data:`FORM_NAMES` of the form that decided.

    Args:
        acc: ``[..., 16]`` float32 or float64.

    Returns:
        float64 ``[...]`` in [0, 1], 1 where anything is unknown, and int64 ``[...]``; ties go to the first.
    """
    values = torch.stack([FORMS[name](acc) for name in METER_FORMS], dim=-1)
    best, which = values.min(dim=-1)
    index = torch.tensor([FORM_NAMES.index(name) for name in METER_FORMS], device=acc.device)
    return best.clamp(max=1.0), index[which]


__all__ = [
    "FORMS",
    "FORM_NAMES",
    "METER_FORMS",
    "eform",
    "extremal",
    "jensen",
    "meter",
    "needle",
    "rms",
    "tanh",
]
