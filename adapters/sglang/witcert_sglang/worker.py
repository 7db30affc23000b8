"""The metered scheduler process: it builds the meter over SGLang's pool, and every pass and write goes by it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from witcert_core import Policy
from witcert_core.serving import META_KEY, Metrics, banner_text, refuse, refuse_on_error, rotary_tables
from witcert_sglang import windows
from witcert_sglang.geometry import attention_ranks, read_geometry, rotary_modules
from witcert_sglang.memory import packed_bytes_per_token, side_bytes_per_token
from witcert_sglang.pool import backend_scales
from witcert_sglang.refusals.server import BACKENDS, without_law
from witcert_sglang.refusals.worker import FLASHINFER_ROWS, FlashInfer, check_layers, check_pool
from witcert_sglang.results import report, send_along, streamer_class
from witcert_sglang.runtime import SglangRuntime
from witcert_sglang.selfcheck import check_attention
from witcert_sglang.startup import check_model, checked_options


class SchedulerProcess:
    """The hooks of a scheduler process. `runtime` exists once the attention backend is built."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.quantizer = policy.resolved_quantizer
        self.runtime: SglangRuntime | None = None

    def make_runtime(self, runner: Any, backend: Any) -> SglangRuntime:
        """The runtime; what cannot be metered ends this process with one line, and so the server."""
        return refuse_on_error(self.build_runtime, runner, backend)

    def build_runtime(self, runner: Any, backend: Any) -> SglangRuntime:
        """One runtime for the process, whichever backends its prompts and its decode steps have."""
        exact_products()
        if self.runtime is None:
            # Not every way to start a scheduler leads by the main process.
            check_model(self.policy, runner.model_config, checked_options(self.policy, runner.server_args))
            pool, own = runner.token_to_kv_pool, self.policy.meters_engine
            subs = check_pool(pool, self.policy, runner.dtype)
            layers = check_layers(runner.model, pool)
            metrics = Metrics() if self.policy.report.prometheus and "PROMETHEUS_MULTIPROC_DIR" in os.environ else None
            ranks = attention_ranks()
            windows_of = {layer.layer_id: int(layer.sliding_window_size) for layer in layers}
            geometry, *others = (
                read_geometry(runner, backend, sub, max(windows_of[n] for n in sub.layers), ranks.rank, ranks.size, own)
                for sub in subs
            )
            scales = backend_scales(layers, runner.server_args.attention_backend) if own else {}
            if own and geometry.device != "cpu":
                refuse(FLASHINFER_ROWS, FlashInfer(backend, scales))
            tables = None
            if self.quantizer.space == "pre_rope":
                found = rotary_modules(runner.model, self.policy.quantizer.layers_of(sorted(windows_of)))
                head_dims = {layer.layer_id: layer.qk_head_dim for layer in layers}
                tables = rotary_tables(found, head_dims, runner.dtype, geometry.device)
            self.runtime = SglangRuntime(
                self.policy,
                geometry,
                pool,
                metrics,
                ranks,
                scales,
                tables,
                runner.req_to_token_pool,
                others,
                runner.model_config.num_hidden_layers,
                without_law(runner.server_args),
            )
        if self.policy.quantizer.storage != "packed":  # which our own kernels attend
            pool = runner.token_to_kv_pool
            layers = check_layers(runner.model, pool)
            windows.check_backend(layers, backend)
            if not self.policy.meters_engine:
                compared = check_attention(backend, layers, runner.req_to_token_pool, pool, runner.dtype)
                self.runtime.compared += compared
        return self.runtime

    def after_cell_size(self, result: int, configurator: Any, kvc: Any, num_layers: int) -> int:
        """Count the witnesses and pass ids as bytes of a token, so that they are taken off the capacity.

        Layers that only make drafts have none.
        """
        if kvc.is_draft_worker:
            return result
        if self.policy.quantizer.storage == "packed":
            return packed_bytes_per_token(self.policy, kvc, num_layers)
        return result + side_bytes_per_token(self.policy, kvc, num_layers)

    def after_window_sizes(self, _result: None, configurator: Any, kvc: Any) -> None:
        """The same for the two pools of layers with and without a window, whose bytes are of one layer each."""
        if not kvc.is_draft_worker:
            configurator._full_per_token += side_bytes_per_token(self.policy, kvc, 1)
            configurator._swa_per_token += side_bytes_per_token(self.policy, kvc, 1, windowed=True)
        configurator._recompute_cell_size()

    def around_forward(
        self, original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.runtime is None or runner.is_draft_worker:
            return original(runner, forward_batch, *args, **kwargs)
        exact_products()
        return self.runtime.around_forward(original, runner, forward_batch, *args, **kwargs)

    def after_sample(self, _result: Any, _runner: Any, logits_output: Any, *_args: Any, **_kwargs: Any) -> None:
        """Let the step's cells travel with its logits, which what was hooked makes a clean slate.

        Sampling may run after the next pass has begun.
        """
        step = getattr(logits_output, "witcert_step", None)
        if step is not None:
            logits_output.witcert_step = None
            send_along(logits_output, step)

    def after_move(self, _result: Any, pool: Any, tgt_loc: Any, src_loc: Any) -> None:
        if self.runtime is not None and (number := self.runtime.sub_pool(pool)) is not None:
            self.runtime.moved(tgt_loc, src_loc, number)

    def after_load(self, _result: Any, pool: Any, _copy: Any, indices: Any, *_args: Any, **_kwargs: Any) -> None:
        if self.runtime is not None and (number := self.runtime.sub_pool(pool)) is not None:
            self.runtime.overwritten(indices, number)

    def after_streamer_class(self, result: type[Any], _scheduler: Any) -> type[Any]:
        return streamer_class(self.live_runtime(), result)

    def after_abort_output(self, _result: Any, _scheduler: Any, _abort_req: Any, req: Any) -> None:
        """Requests that end between passes (preempted, between two chunks) never come by the output stream.

        Of one that was turned away before its first pass there is nothing to tell.
        """
        runtime = self.live_runtime()
        if runtime.planner.knows(req.rid):
            report(runtime, req)

    def after_init_info(self, result: dict[str, Any], scheduler: Any) -> dict[str, Any]:
        runtime = self.live_runtime()
        if runtime.ranks.reports:
            on = "PROMETHEUS_MULTIPROC_DIR" in os.environ
            metrics = "/metrics" if on else "no /metrics: start the server with --enable-metrics"
            print(banner_text(runtime, answers='meta_info["witcert"]', metrics=metrics), file=sys.stderr, flush=True)
        return {**result, "witcert": runtime.status()}

    def before_run_batch(self, scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
        """Say of the requests of the next pass what probes may ask for, where any are enabled."""
        if self.runtime is not None and self.runtime.planner.watches:
            adapters = getattr(scheduler.tp_worker.model_runner, "lora_manager", None)
            self.runtime.facts = {req.rid: facts_of(req, adapters) for req in batch.reqs}

    def around_control(
        self, original: Callable[..., Any], scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Commands about probes; the dumper's own go on to SGLang."""
        if recv_req.method != META_KEY:
            return original(scheduler, recv_req, *args, **kwargs)
        from sglang.srt.managers.io_struct import DumperControlReqOutput

        runtime = self.live_runtime()
        if recv_req.body and self.policy.report.control:
            runtime.command(recv_req.body)
        if runtime.ranks.reports:
            reply = DumperControlReqOutput(success=True, response=runtime.ledger.probes.shown())
            scheduler.ipc_channels.send_to_tokenizer.send_output(reply, recv_req)
        return None

    def live_runtime(self) -> SglangRuntime:
        """The runtime, or SystemExit: without it the server would serve unmetered."""
        if self.runtime is None:
            raise SystemExit(
                "witcert: the attention backend in use is not a metered one, so nothing is served; "
                f"use --attention-backend {' or '.join(BACKENDS)}"
            )
        return self.runtime


def exact_products() -> None:
    """Let products of float32 be of float32.

    SGLang switches to TF32 whenever it makes a runner of GLM-4.5 or MiniMax M2 (`enable_tf32_matmul`, for their routers
    alone), and no radius covers what that rounds of the meter's own products.
    """
    if torch.get_float32_matmul_precision() != "highest":
        torch.set_float32_matmul_precision("highest")


def facts_of(req: Any, adapters: Any) -> dict[str, str | int]:
    """What SGLang knows of a request; adapters: its `LoRAManager`, if it has one."""
    facts: dict[str, str | int] = {"prompt": len(req.origin_input_ids)}
    if req.priority is not None:
        facts["priority"] = req.priority
    if req.lora_id is None:
        facts["lora"] = ""
    elif adapters is not None and req.lora_id in adapters.lora_refs:
        facts["lora"] = adapters.lora_refs[req.lora_id].lora_name
    return facts


def no_beams(_original: Callable[..., Any], *_args: Any, **_kwargs: Any) -> str:
    """What a client that asks for a beam search is told: only the first beam is a request that SGLang names."""
    return "witcert: beam search: the rows of the other beams are not planned; leave beam_width out"
