"""What the metered launches of a captured graph left in static buffers, and whether it is of the step just replayed.

Python does not run when a graph is replayed. So metered launches write accumulators into buffers that outlive the graph
and add what they measured to a counter a layer, on the device. The counters are cleared before a replay and read after
it: a layer whose counter is not exactly the cells of this step is *unknown*, whatever lies in its buffer. A graph
captured without the meter, or a launch left out, leaves the accumulators of an earlier step there.

Shapes: L metered layers, R rows of a batch of at most RMAX, H query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.kernels.counters import MEASURED, advanced
from witcert_core.kernels.host.dispatch import own_arithmetic
from witcert_core.meter.sums import NUM_ACC_FIELDS
from witcert_core.serving.device.rows import visible_tokens
from witcert_core.serving.device.sums import DeviceSums, output_norm
from witcert_core.serving.passes import MeteredRow

REASON = "graph"
"""Why cells of a replay that measured nothing are unknown."""


@dataclass(frozen=True)
class LayerFacts:
    """What a captured launch keeps of its layer: window_left negative for no window; width and dtype of its output."""

    window_left: int = -1
    has_sink: bool = False
    v_dim: int = 0
    dtype: torch.dtype = torch.float32


class CapturedCells:
    """The static buffers of one process: acc [L, RMAX, H, 16] and norm [L, RMAX, H] float32, counters int64.

    layers: global ids of the metered layers. Launches write the buffers of `index(layer)` and add R * H to
    `counters[layer]`.
    """

    def __init__(self, layers: Sequence[int], max_rows: int, num_qo_heads: int, device: str | torch.device) -> None:
        self.layers = tuple(layers)
        shape = (len(self.layers), max_rows, num_qo_heads)
        self.acc = torch.full((*shape, NUM_ACC_FIELDS), float("inf"), device=device)
        self.norm = torch.zeros(shape, device=device)
        self.counters = torch.zeros(max(self.layers, default=-1) + 1, dtype=torch.int64, device=device)
        self.facts: dict[int, LayerFacts] = {}
        self._begun = False

    @property
    def nbytes(self) -> int:
        return self.acc.nbytes + self.norm.nbytes + self.counters.nbytes

    def index(self, layer: int) -> int:
        """Which entry of the buffers belongs to a layer."""
        return self.layers.index(layer)

    def keep(self, layer: int, out: Tensor, facts: LayerFacts) -> None:
        """Beside a launch that writes `acc[index]` and counts by itself: the norms of out [R, H, Dv]. Device work."""
        self.norm[self.index(layer), : out.shape[0]].copy_(output_norm(out))
        self.facts[layer] = replace(facts, v_dim=out.shape[-1], dtype=out.dtype)

    def begin(self) -> None:
        """A metered step is about to be replayed. Device work only: nothing waits."""
        self.counters.zero_()
        self._begun = True

    def read(
        self, rows: Sequence[MeteredRow], delta_loc: Sequence[float], form: str, *, batch: int, padding: int = 0
    ) -> dict[int, DeviceSums]:
        """The sums of `rows` in the layers that measured all `batch` rows of this step; waits for the device.

        `row.token` is a row's place in the batch. padding: rows beside the batch that belong to nobody; a layer with
        a sink counts them, one without has nothing to see there.
        """
        if not self._begun:
            raise InputError("a step ends that was not announced; call begin before the graph is replayed")
        self._begun = False
        if batch > self.acc.shape[1]:
            raise InputError(f"{batch} rows to read from buffers of {self.acc.shape[1]}; capture with more")
        facts = [self.facts.get(layer, LayerFacts()) for layer in self.layers]
        expected = [(batch + padding * fact.has_sink) * self.acc.shape[2] for fact in facts]
        counted = self.counters.tolist()
        status = advanced([0] * len(self.layers), [counted[layer] for layer in self.layers], expected)
        places = torch.tensor([row.token for row in rows], dtype=torch.int64, device=self.acc.device)
        found = {}
        for i, (layer, fact) in enumerate(zip(self.layers, facts, strict=True)):
            if status[i] == MEASURED:
                seen = visible_tokens(rows, fact.window_left)
                found[layer] = DeviceSums(
                    self.acc[i][places],
                    self.norm[i][places],
                    None,
                    num_visible=seen,
                    num_quantized=torch.tensor(seen)[:, None],  # a step decodes from what is packed
                    delta_loc=list(delta_loc),
                    form=form,
                    has_sink=fact.has_sink,
                    v_dim=fact.v_dim,
                    arithmetic=own_arithmetic(fact.dtype, self.acc.device),
                )
        return found
