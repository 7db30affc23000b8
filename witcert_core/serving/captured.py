"""Decode steps inside a captured graph: what its metered launches left in static buffers, and whether it is of now.

Python does not run when a graph is replayed. So metered launches write accumulators into buffers that outlive the graph
and add what they measured to a counter a layer, on the device; the host reads both after the replay. A layer whose
counter did not advance by exactly the cells of this step is *unknown*, whatever lies in its buffer: a graph captured
without the meter, or a launch left out, leaves the accumulators of an earlier step there.

Shapes: L metered layers, R rows of this step of at most RMAX, H query heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.kernels.counters import MEASURED, advanced
from witcert_core.layout import NUM_ACC_FIELDS
from witcert_core.serving.kernel_cells import kernel_cells, output_norm_down
from witcert_core.serving.step import StepCells

REASON = "graph"
"""Why rows of a replay that measured nothing are unknown."""


class CapturedCells:
    """The static buffers of one process: acc [L, RMAX, H, 16] and norm [L, RMAX, H] float32, counters [L] int64.

    layers: global ids of the metered layers. Launches write the buffers of `index(layer)` and add R * H to its counter.
    """

    def __init__(self, layers: Sequence[int], max_rows: int, num_qo_heads: int, device: str | torch.device) -> None:
        self.layers = tuple(layers)
        shape = (len(self.layers), max_rows, num_qo_heads)
        self.acc = torch.full((*shape, NUM_ACC_FIELDS), float("inf"), device=device)
        self.norm = torch.zeros(shape, device=device)
        self.counters = torch.zeros(len(self.layers), dtype=torch.int64, device=device)
        self._before: list[int] | None = None

    def index(self, layer: int) -> int:
        """Which entry of the buffers belongs to a layer."""
        return self.layers.index(layer)

    def record(self, layer: int, acc: Tensor, out: Tensor) -> None:
        """A launch inside the graph: acc [R, H, 16] of its rows, out [R, H, Dv]. Device work only, no synchronisation.

        Kernels that write `acc[index]` and count by themselves need this for the norms only.
        """
        i, rows = self.index(layer), acc.shape[0]
        self.acc[i, :rows].copy_(acc)
        self.norm[i, :rows].copy_(output_norm_down(out))
        self.counters[i : i + 1].add_(rows * acc.shape[1])

    def begin(self) -> None:
        """A step is about to be replayed."""
        self._before = self.counters.tolist()

    def end(self, step: StepCells, delta_loc: Sequence[float], form: str, has_sink: bool = False) -> None:
        """Put what the replay measured of `step.rows`, in their order, into `step.layers`.

        Layers that are not of this step are left out, so their cells are reported as unknown; if all are, the rows
        count as unknown themselves.
        """
        if self._before is None:
            raise InputError("a step ends that was not announced; call begin before the graph is replayed")
        before, self._before = self._before, None
        rows = len(step.rows)
        if rows > self.acc.shape[1]:
            raise InputError(f"{rows} rows to read from buffers of {self.acc.shape[1]}; capture with more")
        expected = [rows * self.acc.shape[2]] * len(self.layers)
        if rows == 0:
            return
        for i, (layer, status) in enumerate(zip(self.layers, advanced(before, self.counters, expected), strict=True)):
            if status == MEASURED:
                step.layers[layer] = kernel_cells(
                    self.acc[i, :rows],
                    self.norm[i, :rows],
                    num_visible=[row.position + 1 for row in step.rows],
                    delta_loc=delta_loc,
                    form=form,
                    has_sink=has_sink,
                )
        if not step.layers:
            for row in step.rows:
                step.unmetered[row.request, REASON] += 1
            step.rows.clear()
