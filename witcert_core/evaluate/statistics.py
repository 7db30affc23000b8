"""One number of a request, out of all its cells: the candidates for a score that ranks requests by their drift.

Shapes: H query heads of a row, C cells of a request, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from witcert_core.evaluate.cells import TAU
from witcert_core.policy.plugins import CellEvent, hookimpl, plugin_manager
from witcert_core.report.risk import MOST_LOG_A

LARGEST = MOST_LOG_A
"""What counts as this at most, so that means exist: infinite bounds are ordered behind all others."""
COLUMNS = ("bound", "log_a", "out_bound", "floor", "tv")
TRUTH = "tv_mean"
"""The one statistic that no meter knows: it needs exact keys."""


class CellsOfRequests:
    """Observes engines built inside `observing`: all cells that read something quantized, by request."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {}

    @hookimpl
    def witcert_on_cell(self, event: CellEvent) -> None:
        """Keep [H', 6] of a row: its layer and `COLUMNS`."""
        cells, row = event.cells, event.row
        read = cells.num_quantized[row] > 0
        relative = torch.where(cells.out_bound[row] == 0, 0.0, cells.out_bound[row] / cells.out_norm[row])
        tv = torch.full_like(relative, torch.nan) if cells.tv_audit is None else cells.tv_audit[row]
        columns = (cells.meter[row], cells.log_a[row], relative, cells.floor[row], tv)
        layer = torch.full_like(relative, event.layer)
        found = torch.stack([layer, *(x.to(relative) for x in columns)], -1)[read]
        self._parts.setdefault(event.request_id, []).append(found)

    def take(self, request_id: str) -> dict[str, float]:
        """Every statistic of a request, which is then forgotten; empty where no cell read anything quantized."""
        found = torch.cat(self._parts.pop(request_id, [torch.zeros(0, 1 + len(COLUMNS))]))
        return statistics_of(found[:, 0], dict(zip(COLUMNS, found[:, 1:].unbind(-1), strict=True)))


@contextmanager
def observing() -> Iterator[CellsOfRequests]:
    """Engines built in the block show their cells to what it is given."""
    cells, manager = CellsOfRequests(), plugin_manager()
    manager.register(cells)
    try:
        yield cells
    finally:
        manager.unregister(cells)


def _uncertified(bound: Tensor) -> Tensor:
    return (bound > TAU).double()


def _capped(x: Tensor) -> Tensor:
    return x.double().nan_to_num(nan=LARGEST, posinf=LARGEST).clamp(max=LARGEST)


def statistics_of(layer: Tensor, columns: Mapping[str, Tensor]) -> dict[str, float]:
    """Of C cells: columns [C] of `COLUMNS`, tv NaN where it is not known; layer [C]."""
    if not layer.numel():
        return {}
    bound, log_a, out = (_capped(columns[name]) for name in ("bound", "log_a", "out_bound"))
    kinds: dict[str, Tensor] = {"bound": bound, "log_a": log_a, "out_bound": out, "log_out_bound": out.log1p()}
    found = {"uncertified_share": float(_uncertified(bound).mean())}
    for name, x in kinds.items():
        found[f"{name}_mean"] = float(x.mean())
        found[f"{name}_median"], found[f"{name}_q90"] = torch.quantile(x, x.new_tensor([0.5, 0.9])).tolist()
        found[f"{name}_max"] = float(x.max())
    for name in ("log_a", "log_out_bound"):
        found |= {f"{name}_{part}": value for part, value in by_depth(layer, kinds[name]).items()}
    floor = columns["floor"].double()
    if bool((floor > 0).any()):  # residual sketches
        found |= {"floor_mean": float(floor.mean()), "floor_max": float(floor.max())}
        found["damaged_share"] = float((floor > TAU).double().mean())
    known = ~columns["tv"].isnan()
    if bool(known.any()):
        found[TRUTH] = float(columns["tv"][known].double().mean())
    return found


def by_depth(layer: Tensor, x: Tensor) -> dict[str, float]:
    """Means [C] weighted over layers: of each third of them, of the worst layer, and root mean square over layers.

    A layer is worth the same whatever its number of cells; a third without cells is left out.
    """
    last = int(layer.max())
    sums = torch.zeros(last + 1, dtype=torch.float64).index_add(0, layer.long(), x.double())
    counts = torch.bincount(layer.long(), minlength=last + 1)
    of_layer, place = sums[counts > 0] / counts[counts > 0], torch.arange(last + 1)[counts > 0]
    parts = {"first_third": 3 * place <= last, "last_third": 3 * (last - place) <= last}
    parts["middle_third"] = ~parts["first_third"] & ~parts["last_third"]
    found = {name: float(of_layer[of].mean()) for name, of in parts.items() if bool(of.any())}
    return {**found, "worst_layer": float(of_layer.max()), "layers_rms": float(of_layer.square().mean().sqrt())}
