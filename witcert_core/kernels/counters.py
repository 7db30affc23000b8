"""Device counters that tell "measured" from "replayed without measuring".

A metered launch adds the cells it measured to its layer's entry of an int64 ``[layers]`` tensor on the device. A
graph replayed with the meter's flag off, or a launch that never happened, adds nothing, and the accumulators
of an earlier step still lie in the buffer: what they say must then not be reported.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.kernels.host.checks import check_vector

MEASURED = "measured"
UNKNOWN = "unknown"


def counter_of(counters: Tensor | None, layer: int) -> Tensor | None:
    """The one entry of ``counters`` int64 ``[LAYERS]`` that a launch adds to."""
    if counters is None:
        return None
    check_vector("counters", counters, counters.numel(), torch.int64)
    if not 0 <= layer < counters.numel():
        raise InputError(f"layer is {layer}; counters has an entry for 0..{counters.numel() - 1}")
    return counters[layer : layer + 1]


def advanced(before: Sequence[int] | Tensor, after: Sequence[int] | Tensor, expected: Sequence[int]) -> list[str]:
    """Status of each layer's cells between two readings of the counters: ``measured`` or ``unknown``.

    Args:
        before, after: the counters ``[LAYERS]`` read (a tensor is copied to the host here) before and after
            the steps in question.
        expected: cells each layer must have measured in between; 0 for a layer that was not to be metered.

    A layer is measured only if its counter moved by exactly what was expected, and that was not nothing. Fewer
    cells means some accumulators are old; more means that steps of somebody else are among them.

    Raises:
        InputError: lengths that differ, or a negative expectation.
    """
    readings = [x.tolist() if isinstance(x, Tensor) else list(x) for x in (before, after)]
    if not len(readings[0]) == len(readings[1]) == len(expected) or any(n < 0 for n in expected):
        raise InputError(
            f"before, after and expected have {len(readings[0])}, {len(readings[1])} and {len(expected)} layers and "
            f"expectations {list(expected)}; lengths must agree and no expectation be negative"
        )
    return [
        MEASURED if want > 0 and new - old == want else UNKNOWN
        for old, new, want in zip(*readings, expected, strict=True)
    ]
