"""Measured cells as observers get them and as they are written: one JSON object a cell.

Shapes: R rows, H query heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from witcert_core.meter.sums import AccField
from witcert_core.policy.plugins import CellEvent

if TYPE_CHECKING:
    pass

CELL_SCHEMA = "witcert.cell/1"
Number = float | Literal["inf"]


def json_number(value: float) -> Number:
    """A number JSON can hold. Infinity, and NaN, which bounds nothing either, become "inf"."""
    return value if math.isfinite(value) else "inf"


def cell_records(event: CellEvent, heads: Sequence[int], form_names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The records (schema witcert.cell/1) of some local heads of one measured row."""
    cells, row = event.cells, event.row
    for head in heads:
        audit = math.nan if cells.tv_audit is None else float(cells.tv_audit[row, head])
        excess = math.nan if cells.excess is None else float(cells.excess[row, head])
        meter = 1.0 if excess > 0 else float(cells.meter[row, head])
        yield {
            "schema": CELL_SCHEMA,
            "request_id": event.request_id,
            "step": event.step,
            "position": event.position,
            "layer": event.layer,
            "q_head": event.head_offset + head,
            "tier": event.tier,
            "meter": 1.0 if math.isnan(meter) else meter,
            "floor": 0.0 if excess > 0 else float(cells.floor[row, head]),
            "form": form_names[int(cells.form[row, head])],
            "log_a": json_number(float(cells.log_a[row, head])),
            "m": json_number(float(cells.acc[row, head, AccField.M])),
            "tv_audit": None if math.isnan(audit) else audit,
            "out_bound": "inf" if excess > 0 else json_number(float(cells.out_bound[row, head])),
            "out_excess": None if math.isnan(excess) else json_number(excess),
            "s": int(cells.num_visible[row]),
            "s_quantized": (quantized := int(cells.num_quantized[row, head])),
            "repaired_blocks": event.repaired_blocks,
            "status": "measured" if quantized or excess > 0 else "exact",
        }


def unknown_record(request_id: str, rows: int, reason: str) -> dict[str, Any]:
    """The record of `rows` query rows of which no cell was measured: the same keys, null where unknown."""
    keys = (
        "step",
        "position",
        "layer",
        "q_head",
        "tier",
        "meter",
        "floor",
        "form",
        "log_a",
        "m",
        "tv_audit",
        "out_bound",
        "out_excess",
    )
    return {
        "schema": CELL_SCHEMA,
        "request_id": request_id,
        **dict.fromkeys(keys),
        "s": None,
        "s_quantized": None,
        "repaired_blocks": 0,
        "status": "unknown",
        "rows": rows,
        "reason": reason,
    }
