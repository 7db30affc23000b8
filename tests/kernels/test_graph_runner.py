"""SGLang's own model runner and decode graph runner around the metered backend, device graphs replaced by recordings.

Every decode pass is run twice from the same state: eagerly, and as the replay of a captured graph.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from array import array
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from witcert_core.meter.cells import CellBatch
from witcert_core.serving.steps import StepCells

from .recorder import RecordedBackend

pytest.importorskip("sglang")
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

LAYERS, HEADS, CAPTURED = 2, 4, 3
DECODE_KERNELS = ("decode_split", "merge_splits")


class Runner:
    """One `ModelRunner` of the demonstration model's first layers over a packed pool read by (interpreted) kernels."""

    def __init__(self, work: Path) -> None:
        from sglang.benchmark import one_batch
        from sglang.srt.model_executor.runner import decode_cuda_graph_runner as module
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import get_exec
        from sglang.srt.server_args import PortArgs, ServerArgs
        from witcert_demo.run import CHECKPOINT

        policy = {"quantizer": {"name": "int8_dither", "storage": "packed"}, "meter": {"stride": 2}}
        (work / "policy.yaml").write_text(yaml.safe_dump({"version": 1, **policy}))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WITCERT_POLICY", str(work / "policy.yaml"))
            load_plugins()
        shutil.copytree(CHECKPOINT, work / "model")
        config = json.loads((CHECKPOINT / "config.json").read_text())
        (work / "model" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
        args = ServerArgs(
            model_path=str(work / "model"),
            device="cpu",
            dtype="float32",
            attention_backend="triton",
            context_length=128,
            max_total_tokens=512,
            max_running_requests=4,
            skip_server_warmup=True,
        )
        args.resolve_once()
        ranks = one_batch.SpawnRanks(world_rank=one_batch.spawn_world_rank(args, tp_rank=0, pp_rank=0), gpu_id=0)
        one_batch.publish(args, role="scheduler", ranks=ranks)
        one_batch._init_process_global_configs()
        self.engine, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
        self.model = self.engine.torch_runner
        self.runtime = self.model.attn_backend.witcert_runtime
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "resolve_decode_backend", RecordedBackend)
            patch.setattr(torch.cpu, "is_current_stream_capturing", lambda: False, raising=False)
            patch.setattr(get_exec().graph.cuda_graph_config.decode, "bs", [CAPTURED])
            self.graphs = module.DecodeCudaGraphRunner(self.model)

    def prompts(self, lengths: list[int]) -> list[Any]:
        """Requests with prompts of these lengths."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        requests = []
        for i, length in enumerate(lengths):
            sampling = SamplingParams(temperature=0, max_new_tokens=16)
            request = Req(f"r{i}", "", array("q", [7 + i + j for j in range(length)]), sampling)
            request.full_untruncated_fill_ids = request.origin_input_ids
            request.logprob_start_len = -1
            request.extend_end = length
            requests.append(request)
        return requests

    def start(self, lengths: list[int]) -> tuple[Any, Any]:
        """Prompts of new requests; their next tokens and the batch."""
        self.engine.clear()
        for i in range(len(lengths)):
            self.runtime.forget(f"r{i}")
        self.model.decode_cuda_graph_runner = None
        tokens, _, batch = self.engine.extend(self.prompts(lengths))
        return tokens, batch

    def decode_batch(self, tokens: Any, batch: Any) -> Any:
        """SGLang's batch of one decode pass."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        batch.input_ids = tokens.to(torch.int64)
        batch.prepare_for_decode()
        return ForwardBatch.init_new(batch, self.model, return_hidden_states_before_norm=False)

    def forward(self, batch: Any, graphs: bool) -> tuple[torch.Tensor, StepCells]:
        self.model.decode_cuda_graph_runner = self.graphs if graphs else None
        output = self.model.forward(copy.copy(batch))
        assert output.can_run_graph == graphs
        return output.logits_output.next_token_logits.clone(), output.logits_output.witcert_step.step

    def state(self) -> tuple[list[torch.Tensor], Any]:
        """Everything a pass changes."""
        pool, runtime = self.model.token_to_kv_pool, self.runtime
        buffers = (pool.k_buffer, pool.v_buffer, pool.k_scale_buffer, pool.v_scale_buffer)
        tensors = [
            *(x for buffer in buffers for x in buffer),
            runtime.groups[0].pass_ids,
            runtime.groups[0].cache.storage.kernels.pass_bits,
        ]
        return tensors, (runtime.planner, runtime.passes)

    def both(self, batch: Any) -> tuple[tuple[torch.Tensor, StepCells], tuple[torch.Tensor, StepCells]]:
        """The pass eagerly and replayed, from the same state; what they write must be the same."""
        tensors, (planner, passes) = self.state()
        before = [x.clone() for x in tensors], copy.deepcopy(planner._requests)
        eager = self.forward(batch, graphs=False)
        written = [x.clone() for x in tensors], copy.deepcopy(planner._requests)
        for x, old in zip(tensors, before[0], strict=True):
            x.copy_(old)
        planner._requests, self.runtime.passes = before[1], passes
        replayed = self.forward(batch, graphs=True)
        for x, new in zip(tensors, written[0], strict=True):
            assert torch.equal(x[1:].nan_to_num(), new[1:].nan_to_num())
        assert planner._requests == written[1]  # so the failure budget was spent as often
        return eager, replayed


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("graphs"))


def assert_equal(mine: CellBatch, theirs: CellBatch) -> None:
    for field in fields(CellBatch):
        a, b = getattr(mine, field.name), getattr(theirs, field.name)
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b), field.name


def test_replays_measure_what_eager_passes_do(runner: Runner) -> None:
    """Also in a batch padded up to the captured size, and from step to step of growing requests."""
    for lengths, steps in (([21, 6], 3), ([9, 5, 7], 1)):
        tokens, batch = runner.start(lengths)
        metered = 0
        for _ in range(steps):
            forward = runner.decode_batch(tokens, batch)
            (logits, eager), (same, replayed) = runner.both(forward)
            assert runner.graphs.backend.replayed[-1] == CAPTURED
            assert torch.equal(logits, same)
            assert replayed.rows == eager.rows
            assert replayed.unmetered == eager.unmetered
            assert replayed.lost == {}
            assert replayed.layers.keys() == eager.layers.keys()
            assert replayed.deterministic_layers.keys() == eager.deterministic_layers.keys() == eager.layers.keys()
            for layer, cells in eager.layers.items():
                assert_equal(replayed.layers[layer], cells)
                assert_equal(replayed.deterministic_layers[layer], eager.deterministic_layers[layer])
                assert (cells.meter < 1).all()
            metered += bool(eager.layers)
            tokens = logits.argmax(-1)
        assert metered == -(-steps // 2)


def test_steps_between_the_stride_run_without_the_meter(runner: Runner) -> None:
    tokens, batch = runner.start([9, 12])
    captured = runner.runtime.graphs.captured
    forward = runner.decode_batch(tokens, batch)
    logits, step = runner.forward(forward, graphs=True)
    assert step.layers
    counted, sums = captured.cells.counters.clone(), captured.cells.acc.clone()
    assert (counted == 2 * HEADS).all()
    _, step = runner.forward(runner.decode_batch(logits.argmax(-1), batch), graphs=True)
    assert (step.rows, step.layers, step.lost) == ([], {}, {})
    assert step.unmetered == {(0, "stride"): 1, (1, "stride"): 1}
    assert torch.equal(captured.cells.counters, counted)  # neither counted nor written
    assert torch.equal(captured.cells.acc, sums)


@pytest.mark.parametrize("lost", [{1}, set(range(LAYERS))], ids=["one layer", "all layers"])
def test_layers_that_do_not_count_are_unknown(runner: Runner, lost: set[int]) -> None:
    """A replay in which their metered launches are left out; old accumulators lie in the buffers."""
    tokens, batch = runner.start([9, 12])
    logits, _ = runner.forward(runner.decode_batch(tokens, batch), graphs=True)
    runner.forward(runner.decode_batch(logits.argmax(-1), batch), graphs=True)
    forward = runner.decode_batch(logits.argmax(-1), batch)
    seen: list[int] = []

    def leave_out(func: Any) -> bool:
        if func.name() not in DECODE_KERNELS:
            return False
        seen.append(len(seen))
        launch = (len(seen) - 1) // 2
        return launch // 3 in lost and launch % 3 != 1  # metered, unmetered, deterministic

    backend = runner.graphs.backend
    backend.leave_out = leave_out
    try:
        _, step = runner.forward(forward, graphs=True)
    finally:
        backend.leave_out = lambda _func: False
    assert len(seen) == 2 * 3 * LAYERS
    assert step.lost == dict.fromkeys(lost, "graph")
    assert step.layers.keys() == set(range(LAYERS)) - lost
    ledger = runner.runtime.ledger
    step.count(ledger, {0})
    summary = ledger.finish("r0", "stop")
    assert summary["rows_seen"] == 1
    assert summary["unknown_reasons"] == {"graph": len(lost) * HEADS}
    assert summary["cells_measured"] == (LAYERS - len(lost)) * HEADS


def test_larger_batches_are_eager(runner: Runner) -> None:
    tokens, batch = runner.start([5, 6, 7, 8])
    forward = runner.decode_batch(tokens, batch)
    runner.model.decode_cuda_graph_runner = runner.graphs
    output = runner.model.forward(forward)
    assert not output.can_run_graph
    assert len(output.logits_output.witcert_step.step.layers) == LAYERS
