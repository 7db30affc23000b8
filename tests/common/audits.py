"""What an audited step says, where it must have been audited."""

from __future__ import annotations

from torch import Tensor

from witcert_core.meter.cells import CellBatch


def audit_of(cells: CellBatch) -> Tensor:
    """True TV [R, H] float64 of a batch with exact keys."""
    assert cells.tv_audit is not None
    return cells.tv_audit
