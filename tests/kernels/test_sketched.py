"""Rows of a sample are bounded by sketches alike in the caches that kernels read and in their references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from witcert_core.meter.truth import SketchedBounds

from . import test_serving as packed
from . import test_simulated as simulated

pytestmark = pytest.mark.usefixtures("kernels")

METER: dict[str, Any] = {"audit_every": 0, "audit_share": 1.0, "sketch_share": 1.0}


def tv_of(found: SketchedBounds, number: int) -> Tensor:
    fields = found.of(number)
    assert fields is not None
    (tv,) = fields
    return tv


def assert_alike(kernels: Any, reference: Any | None, atol: float, **options: Any) -> None:
    rows = 0
    for new in simulated.PASSES:
        mine = kernels.step(new, **options)[0]
        theirs = reference.step(new, **options)[0] if reference else None
        if not mine.rows:
            assert not mine.sketched
            continue
        found, truth, cells = mine.sketched[0], mine.truths[0], mine.layers[0]
        assert sorted(found.rows) == list(range(len(mine.rows)))
        for number in found.rows:
            true = truth.of(number)
            assert true is not None
            bound = tv_of(found, number)
            assert (true[0] <= bound).all()
            read = cells.num_quantized[number] > 0
            assert bound[read].sum() < cells.meter[number][read].sum()
            if theirs:
                torch.testing.assert_close(bound, tv_of(theirs.sketched[0], number), rtol=1e-6, atol=atol)
        rows += len(mine.rows)
    assert rows > 2


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [("fp8_e4m3_cast", torch.float16, {"window_left": 6}), ("int8_dither", torch.float32, {})],
    ids=str,
)
def test_of_a_simulated_cache(name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    kinds = "kernels", "torch"
    kernels, reference = (simulated.Served(kind, name, dtype, meter=METER) for kind in kinds)
    assert_alike(kernels, reference, 1e-9, **options)


@pytest.mark.parametrize("options", [{"window_left": 6}, {}], ids=str)
def test_of_a_packed_cache(options: dict[str, Any]) -> None:
    """The kernels' own products err by more than those of the reference, which is in their bounds: thousandths here."""
    kernels, reference = (packed.Served(kind, "int8_dither", **METER) for kind in ("kernels", "torch"))
    assert_alike(kernels, None if options else reference, 0.005, **options)  # the reference has no window
