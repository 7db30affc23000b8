"""How kernel accumulators are held against reference ones: outward, and not far outward."""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.kernels.certify import Certificate
from witcert_core.meter.bounds import meter
from witcert_core.meter.sums import AccField

DOWN = (AccField.P_H, AccField.RHO_MIN)


def assert_outward(kernel: Tensor, reference: Tensor, slack: float = 4e-3, absolute: float = 1e-12) -> None:
    """Every field at least (``P_H``, ``RHO_MIN``: at most) the reference, and within ``slack`` of it.

    ``absolute`` allows for a sink, which has the radius 2^-20 in the kernels and 0 in the reference.
    """
    for field in AccField:
        got, want = kernel[..., field].double(), reference[..., field].double()
        if field in DOWN:
            low, high = want * (1 - slack) - absolute, want
        else:
            low, high = want, want * (1 + slack) + absolute
        same = (got == want) | ((got >= low) & (got <= high))
        assert bool(same.all()), f"{field.name}: {got[~same][:4].tolist()} against {want[~same][:4].tolist()}"
    assert not bool(torch.isnan(kernel).any())


def engine_meter(found: Certificate) -> Tensor:
    """Bound ``[R, Hq]`` on TV of the **engine's** weights: its kernel adds at most ``tanh(omega / 2)`` to the meter."""
    extra = torch.tanh(0.5 * found.omega.double()).nan_to_num(nan=1.0)
    return (meter(found.acc)[0] + extra * (1.0 + 2.0**-20)).clamp(max=1.0)
