"""SGLang's own model runner over a checkpoint, in this process: the passes of its benchmark of one batch, metered.

No scheduler, no clients: what a server does beside its passes is not here. One runner after another; the parallel state
of a process, which SGLang makes once, is that of all of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from sglang.benchmark import one_batch
from sglang.srt.distributed import bootstrap
from sglang.srt.eplb.expert_location import set_global_expert_location_metadata
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_loader import loader
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs
from witcert_sglang.backend import metered_factory
from witcert_sglang.runtime import SglangRuntime
from witcert_sglang.worker import SchedulerProcess

from tests.zoo.family import fill
from witcert_core import Policy
from witcert_core.serving import StepCells


class Runner:
    """A model runner whose passes are metered."""

    def __init__(self, runner: Any, runtime: SglangRuntime, steps: list[StepCells]) -> None:
        self.runner, self.runtime, self.steps = runner, runtime, steps

    def ask(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[dict[str, Any]]:
        """The summaries of requests with these token ids, in one batch, that get `tokens` tokens each."""
        sampling = SamplingParams(temperature=0, max_new_tokens=tokens)
        requests = []
        for number, ids in enumerate(prompts):
            request = Req(f"r{number}", "", array("q", ids), sampling)
            request.full_untruncated_fill_ids = request.origin_input_ids
            request.logprob_start_len, request.extend_end = -1, len(ids)
            requests.append(request)
        chosen, _, batch = one_batch.extend(requests, self.runner)
        for _ in range(tokens - 1):
            chosen, _ = one_batch.decode(chosen, batch, self.runner)
        for step in self.steps:
            step.count(self.runtime.ledger, set(range(len(requests))))
        return [self.runtime.finish(request.rid, "length") for request in requests]


@contextmanager
def running(model: Path, policy: Policy, **options: Any) -> Iterator[Runner]:
    """A runner for the length of the block. options: as for SGLang's `ServerArgs`."""
    process, steps = SchedulerProcess(policy), list[StepCells]()

    def forward(runner: ModelRunner, *args: Any, **kwargs: Any) -> Any:
        output = process.around_forward(stock, runner, *args, **kwargs)
        if (sent := getattr(output.logits_output, "witcert_step", None)) is not None:
            steps.append(sent.step)
        return output

    given = {"attention_backend": "torch_native", "max_total_tokens": 2048, "max_running_requests": 4, **options}
    args = ServerArgs(model_path=str(model), device="cpu", **given)
    args.resolve_once()
    ports = PortArgs.init_new(args)
    one_batch.publish(args, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=0, gpu_id=0))
    one_batch._init_process_global_configs()
    stock: Callable[..., Any] = ModelRunner.forward
    made = {name: metered_factory(factory, process.make_runtime) for name, factory in ATTENTION_BACKENDS.items()}
    begun = bootstrap._PARALLEL_INITIALISED
    with (
        mock.patch.dict(ATTENTION_BACKENDS, made),
        mock.patch.object(ModelRunner, "forward", forward),
        mock.patch.object(loader, "initialize_dummy_weights", fill_all),
        mock.patch.object(
            bootstrap, "init_parallel_runtime", bootstrap.init_parallel_runtime if not begun else no_more
        ),
        torch.no_grad(),
    ):
        set_global_expert_location_metadata(None, allow_overwrite=True)  # of the runner before
        bench, _ = one_batch.load_model(args, ports, 0, 0)
        yield Runner(bench.torch_runner, process.live_runtime(), steps)


def fill_all(model: Any) -> None:
    for values in model.state_dict().values():
        fill(values)


def no_more(**_kwargs: Any) -> None:
    """The process has its parallel state."""
