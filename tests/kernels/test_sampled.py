"""A sample of requests is told the same truth by the caches that kernels read as a full audit finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from . import test_serving as packed
from . import test_simulated as simulated

pytestmark = pytest.mark.usefixtures("kernels")

SAMPLE, EVERY = {"audit_every": 0, "audit_share": 1.0}, {"audit_every": 1}


def assert_alike(sampled: Any, full: Any, **options: Any) -> None:
    rows = 0
    for new in simulated.PASSES:
        mine, theirs = (served.step(new, **options)[0] for served in (sampled, full))
        if not mine.rows:
            assert not mine.truths
            continue
        truth, audited = mine.truths[0], theirs.layers[0].tv_audit
        assert audited is not None
        order = torch.tensor(truth.rows).argsort()
        torch.testing.assert_close(truth.tv[order], audited, rtol=1e-6, atol=1e-9)
        assert (truth.tv[order] <= mine.layers[0].meter).all()
        assert (truth.out[order] <= mine.layers[0].out_bound).all()
        rows += len(mine.rows)
    assert rows > 2


@pytest.mark.parametrize(("name", "options"), [("fp8_e4m3_cast", {"window_left": 6}), ("int8_dither", {})], ids=str)
def test_of_a_simulated_cache(name: str, options: dict[str, Any]) -> None:
    sampled, full = (simulated.Served("kernels", name, torch.float32, meter=meter) for meter in (SAMPLE, EVERY))
    assert_alike(sampled, full, **options)


def test_of_a_packed_cache() -> None:
    sampled, full = (packed.Served("kernels", "int8_dither", **meter) for meter in (SAMPLE, EVERY))
    assert_alike(sampled, full, window_left=6)
