"""A graph that is replayed with the meter, without it, or with a launch missing: what may be said of its cells."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.meter.sums import accumulate
from witcert_core.policy.model import parse_policy
from witcert_core.report.ledger import RequestLedger
from witcert_core.serving.device.captured import REASON, CapturedCells, LayerFacts
from witcert_core.serving.passes import MeteredRow
from witcert_core.serving.steps import StepCells

LAYERS, HEADS, TOKENS, DIM = (1, 3), 4, 9, 16


class FakeGraph:
    """What a captured graph is to the host: launches recorded once, run again on whatever the static inputs hold."""

    def __init__(self) -> None:
        self.launches: list[Callable[[], None]] = []

    def capture(self, *launches: Callable[[], None]) -> None:
        self.launches += launches

    def replay(self) -> None:
        for launch in self.launches:
            launch()


class Decode:
    """Static inputs of a decode of R rows, and its metered launch for a layer."""

    def __init__(self, captured: CapturedCells, rows: int = 2) -> None:
        self.captured = captured
        self.rows = rows
        self.logits = torch.zeros(rows, HEADS, TOKENS, dtype=torch.float64)
        self.radius = torch.zeros(rows, HEADS, TOKENS, dtype=torch.float64)
        self.v = torch.zeros(TOKENS, 1, DIM, dtype=torch.float64)

    def new_inputs(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits.copy_(torch.randn(self.logits.shape, generator=generator))
        self.radius.copy_(torch.rand(self.radius.shape, generator=generator) * 0.2)
        self.v.copy_(torch.randn(self.v.shape, generator=generator))

    def cells(self) -> tuple[Tensor, Tensor]:
        rho = torch.full((TOKENS, 1), 0.01, dtype=torch.float64)
        acc = [accumulate(self.logits[r], self.radius[r], self.v, rho, None) for r in range(self.rows)]
        out = self.logits.softmax(-1) @ self.v[:, 0]
        return torch.stack(acc).float(), out.float()

    def launch(self, layer: int) -> Callable[[], None]:
        """What a metered launch does to the buffers."""

        def run() -> None:
            acc, out = self.cells()
            self.captured.acc[self.captured.index(layer), : self.rows].copy_(acc)
            self.captured.counters[layer : layer + 1].add_(self.rows * HEADS)
            self.captured.keep(layer, out, LayerFacts())

        return run

    def replayed(self, graph: FakeGraph) -> StepCells:
        """A step of this many rows through the graph."""
        rows = [MeteredRow(i, i, TOKENS - 1, 1, False) for i in range(self.rows)]
        step = StepCells([f"r{i}" for i in range(self.rows)], rows)
        self.captured.begin()
        graph.replay()
        end(self.captured, step)
        return step


def end(captured: CapturedCells, step: StepCells) -> None:
    """The replay is over."""
    step.summed |= captured.read(step.rows, [0.0] * len(step.rows), "auto", batch=len(step.rows))
    step.lost |= dict.fromkeys(set(LAYERS) - set(step.summed), REASON)
    step.settle()


@pytest.fixture
def captured() -> CapturedCells:
    return CapturedCells(LAYERS, max_rows=5, num_qo_heads=HEADS, device="cpu")


def ledger_of() -> RequestLedger:
    policy = parse_policy({"version": 1, "quantizer": {"name": "none"}, "meter": {"stride": 1}})
    return RequestLedger(policy, "test", num_layers=4, num_qo_heads=HEADS, layers_excluded={0: "x", 2: "x"})


def graph_of(*launches: Callable[[], None]) -> FakeGraph:
    graph = FakeGraph()
    graph.capture(*launches)
    return graph


def test_every_replay_is_measured_afresh(captured: CapturedCells) -> None:
    decode = Decode(captured)
    graph = graph_of(*map(decode.launch, LAYERS))
    meters = []
    for seed in range(3):
        decode.new_inputs(seed)
        step = decode.replayed(graph)
        assert set(step.layers) == set(LAYERS)
        assert not step.unmetered
        acc, out = decode.cells()
        for cells in step.layers.values():
            assert torch.equal(cells.acc, acc.double())
            norm = out.norm(dim=-1).double()
            assert (cells.out_norm <= norm).all()
            assert torch.allclose(cells.out_norm, norm, rtol=1e-3)
            assert (cells.meter < 1).all()
        meters.append(step.layers[LAYERS[0]].meter)
    assert not torch.equal(meters[0], meters[1])


def test_a_graph_captured_without_the_meter_is_unknown(captured: CapturedCells) -> None:
    """The accumulators of the metered step before still lie in the buffers, and look like a measurement."""
    decode = Decode(captured)
    decode.new_inputs(0)
    assert decode.replayed(graph_of(*map(decode.launch, LAYERS))).layers
    assert captured.acc[:, :2].isfinite().all()
    step = decode.replayed(graph_of())
    assert step.layers == {}
    assert step.lost == dict.fromkeys(LAYERS, "graph")
    ledger = ledger_of()
    step.count(ledger, {0})
    summary = ledger.summary("r0")
    assert summary["rows_metered"] == summary["cells_measured"] == 0
    assert summary["unknown_reasons"] == {"graph": 4 * HEADS}
    assert ledger.summary("r1")["rows_seen"] == 0


def test_a_launch_left_out_makes_its_layer_unknown(captured: CapturedCells) -> None:
    decode = Decode(captured)
    decode.new_inputs(0)
    decode.replayed(graph_of(*map(decode.launch, LAYERS)))
    step = decode.replayed(graph_of(decode.launch(LAYERS[1])))
    assert set(step.layers) == {LAYERS[1]}
    ledger = ledger_of()
    step.count(ledger, {0, 1})
    summary = ledger.summary("r0")
    assert summary["cells_measured"] == HEADS
    assert summary["unknown_reasons"] == {"graph": HEADS, "layer excluded from metering": 2 * HEADS}
    # The next row is lost by the other layer: two rows were seen all the same.
    decode.replayed(graph_of(decode.launch(LAYERS[0]))).count(ledger, {0, 1})
    summary = ledger.summary("r0")
    assert summary["rows_seen"] == 2
    assert summary["unknown_reasons"]["graph"] == 2 * HEADS
    assert summary["cells_measured"] + summary["cells_unknown"] == summary["rows_seen"] * 4 * HEADS


@pytest.mark.parametrize("other", [1, 3], ids=["fewer rows", "more rows"])
def test_a_graph_of_another_batch_size_is_unknown(captured: CapturedCells, other: int) -> None:
    decode, captured_for = Decode(captured), Decode(captured, rows=other)
    for inputs in (decode, captured_for):
        inputs.new_inputs(0)
    graph = graph_of(*map(captured_for.launch, LAYERS))
    assert decode.replayed(graph).layers == {}


def test_buffers_never_written_bound_nothing(captured: CapturedCells) -> None:
    assert captured.acc.isinf().all()
    step = Decode(captured, rows=2)
    captured.begin()
    captured.counters += 2 * HEADS  # someone counts without measuring
    cells = StepCells(["a", "b"], [MeteredRow(i, i, 3, 1, False) for i in range(step.rows)])
    end(captured, cells)
    assert all((batch.meter == 1).all() and batch.out_bound.isinf().all() for batch in cells.layers.values())


def test_misuse_is_refused(captured: CapturedCells) -> None:
    step = StepCells(["a"], [MeteredRow(0, i, 3, 1, False) for i in range(6)])
    with pytest.raises(InputError, match="begin"):
        end(captured, step)
    captured.begin()
    with pytest.raises(InputError, match="buffers of 5"):
        end(captured, step)
