"""An observer as a plugin: the worst cell of every request, on the log."""

import logging
from typing import Any

from witcert_core import CellEvent, hookimpl

LOG = logging.getLogger("witcert.worst")
_worst: dict[str, tuple[float, int, int]] = {}


@hookimpl
def witcert_on_cell(event: CellEvent) -> None:
    """Called for each measured row of a layer, all heads at once. Tensors are shared with the meter: read only."""
    bounds = event.cells.meter[event.row]
    head = int(bounds.argmax())
    found = (float(bounds[head]), event.layer, event.head_offset + head)
    _worst[event.request_id] = max(found, _worst.get(event.request_id, found))


@hookimpl
def witcert_report(summary: dict[str, Any]) -> None:
    """Called with the summary of each request that finished."""
    if summary["request_id"] in _worst:
        bound, layer, head = _worst.pop(summary["request_id"])
        LOG.warning("%s: at most %.3f, in layer %d, head %d", summary["request_id"], bound, layer, head)
