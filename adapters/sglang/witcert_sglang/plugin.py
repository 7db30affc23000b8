"""Installs the meter in one SGLang process: which hooks there are, and what each of them does."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

from witcert_core.errors import UnsupportedError
from witcert_core.policy.model import Policy, load_policy
from witcert_core.quantizers.base import Quantizer
from witcert_core.report.jsonl import check_writable
from witcert_core.report.prometheus import Metrics
from witcert_core.serving.banner import banner
from witcert_core.serving.doctor import unreadable
from witcert_core.serving.rotary import rotary_tables
from witcert_core.serving.startup import refuse_on_error
from witcert_sglang import packed, support, windows
from witcert_sglang.backend import metered_factory
from witcert_sglang.geometry import read_geometry
from witcert_sglang.hooks import Hook, register
from witcert_sglang.memory import packed_bytes_per_token, side_bytes_per_token
from witcert_sglang.pool import backend_scales
from witcert_sglang.ranks import attention_ranks
from witcert_sglang.results import report, send_along, streamer_class
from witcert_sglang.rotary import rotary_modules
from witcert_sglang.runtime import SglangRuntime
from witcert_sglang.selfcheck import check_attention

_MODEL_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_ABORTED = f"{_SCHEDULER}.send_abort_output"
_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_CELL_SIZE = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size"
_CONFIGURE_DTYPE = "sglang.srt.mem_cache.kv_cache_dtype.configure_kv_cache_dtype"
_BUILD_METHOD = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mha_quant_method"
_BEAMS = "sglang.srt.beam_search.coordinator.BeamCoordinator.validate_and_init"
_FUSED_WRITE = "sglang.srt.models.utils.enable_fused_set_kv_buffer"
_LAUNCH = "sglang.srt.entrypoints.engine.Engine._launch_subprocesses"
_SERVE = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
_SERVE_PARAMETERS = ("server_args", "tokenizer_manager", "template_manager", "port_args", "scheduler_infos")
_WORKERS = ("run_scheduler_process", "run_detokenizer_process", "run_data_parallel_controller_process")


class Installation:
    """The adapter in this process. `runtime` exists in scheduler processes once the attention backend is built."""

    def __init__(self, policy: Policy, quantizer: Quantizer) -> None:
        self.policy = policy
        self.quantizer = quantizer
        self.runtime: SglangRuntime | None = None

    def hooks(self) -> list[Hook]:
        """All hooks; those of the main process serve HTTP clients and the start-up checks."""
        from witcert_sglang import answers

        every = [
            Hook(_CELL_SIZE, "after", self.after_cell_size, "every", ("self", "kvc", "num_layers")),
            Hook(f"{_MODEL_RUNNER}.forward", "around", self.around_forward, "every", ("self", "forward_batch")),
            Hook(
                f"{_MODEL_RUNNER}.sample",
                "after",
                self.after_sample,
                "every",
                ("self", "logits_output", "forward_batch"),
            ),
            Hook(
                f"{_MODEL_RUNNER}.compute_logprobs_only",
                "after",
                self.after_sample,
                "every",
                ("self", "logits_output", "forward_batch"),
            ),
            Hook(_FUSED_WRITE, "around", no_fused_write, "every", ("forward_batch",)),
            Hook(f"{_POOL}.move_kv_cache", "after", self.after_move, "every", ("self", "tgt_loc", "src_loc")),
            Hook(f"{_POOL}.load_cpu_copy", "after", self.after_load, "every", ("self", "kv_cache_cpu", "indices")),
            Hook(f"{_SCHEDULER}.get_output_streamer_class", "after", self.after_streamer_class, "every", ("self",)),
            Hook(f"{_SCHEDULER}.get_init_info", "after", self.after_init_info, "every", ("self",)),
            Hook(_ABORTED, "after", self.after_abort_output, "every", ("self", "abort_req", "req")),
            Hook(_BEAMS, "around", no_beams, "every", ("self", "req", "recv_req")),
        ]
        if self.policy.quantizer.storage == "packed":
            every += [
                Hook(
                    _CONFIGURE_DTYPE, "around", packed.around_configure_dtype, "every", ("server_args_kv_cache_dtype",)
                ),
                Hook(
                    _BUILD_METHOD, "around", packed.around_build_method(self.quantizer), "every", ("self", "num_layers")
                ),
            ]
        main = [
            Hook(f"{_SERVER_ARGS}.resolve_once", "before", self.before_resolve, "main", ("self",)),
            Hook(f"{_SERVER_ARGS}.check_server_args", "after", self.after_check_server_args, "main", ("self",)),
            Hook(_LAUNCH, "after", self.after_launch, "main", ("cls", "server_args")),
            Hook(_SERVE, "before", self.before_http, "main", _SERVE_PARAMETERS),
            *answers.hooks(self.policy),
        ]
        return every + (main if is_main_process() else [])

    # Main process: refuse before anything starts ----------------------------------------------------------------

    def before_resolve(self, server_args: Any, *_args: Any, **_kwargs: Any) -> None:
        refuse_on_error(support.check_model_path, server_args.model_path)
        refuse_on_error(check_kind_early, server_args)

    def after_check_server_args(self, _result: Any, server_args: Any) -> None:
        args = refuse_on_error(self.checked_options, server_args)
        config = refuse_on_error(model_config, server_args)
        refuse_on_error(self.check_model, config, args)
        if self.policy.report.jsonl:
            refuse_on_error(check_writable, self.policy.report.jsonl)
        refuse_on_error(support.check_port, args.host, args.port)

    def check_model(self, config: Any, args: Any) -> None:
        """Raise what refuses a model (SGLang's `ModelConfig`) under the server's options as SGLang resolved them."""
        cache_dtype = "auto" if self.policy.meters_engine else args.kv_cache_dtype
        support.check_served_model(
            config, self.policy, self.quantizer, args.attention_backend, cache_dtype, args.device
        )

    def checked_options(self, server_args: Any) -> Any:
        """The server's options as SGLang resolved them; UnsupportedError for some that cannot be metered."""
        from sglang.srt.arg_groups.overrides import resolved_view

        args, policy = resolved_view(server_args), self.policy
        support.check_server(args, policy.meters_engine)
        support.check_graphs(policy, args)
        if policy.meters_engine:
            support.check_engine_cache(policy.prefill_reads, args)
        support.check_gate(policy.repairs, policy.gate.on_exhausted, args)
        support.check_storage(policy.quantizer.storage, args)
        support.check_sharing(self.quantizer, args)
        return args

    def after_launch(self, result: Any, *_args: Any, **_kwargs: Any) -> None:
        self.expect_meter(result[3].scheduler_infos)

    def before_http(
        self,
        _server_args: Any,
        _tokenizer_manager: Any,
        _template_manager: Any,
        _port_args: Any,
        scheduler_infos: Any,
        *_args: Any,
        **_kwargs: Any,
    ) -> None:
        """Where a program calls `launch_server` itself, plugins are loaded after `_launch_subprocesses` began."""
        from witcert_sglang import http

        self.expect_meter(scheduler_infos)
        http.add_routes()

    def expect_meter(self, infos: Any) -> None:
        """The scheduler must have said that it is metered; a server that is not is stopped here."""
        from sglang.srt.utils.common import kill_process_tree

        from witcert_sglang import http

        status = infos[0].get("witcert") if infos else None
        if status is None:
            kill_process_tree(os.getpid(), include_parent=False)
            raise SystemExit(
                "witcert: the scheduler process came up without the meter (see its log above), so nothing is served; "
                "unset WITCERT_POLICY to serve without it"
            )
        http.STATE.status = status

    # Scheduler process ------------------------------------------------------------------------------------------

    def make_runtime(self, runner: Any, backend: Any) -> SglangRuntime:
        """The runtime; what cannot be metered ends this process with one line, and so the server."""
        return refuse_on_error(self.build_runtime, runner, backend)

    def build_runtime(self, runner: Any, backend: Any) -> SglangRuntime:
        """One runtime for the process, whichever backends its prompts and its decode steps have."""
        if self.runtime is None:
            # Not every way to start a scheduler leads by the main process.
            self.check_model(runner.model_config, self.checked_options(runner.server_args))
            pool, own = runner.token_to_kv_pool, self.policy.meters_engine
            if own:
                support.check_engine_pool(pool, runner.dtype)
            else:
                support.check_pool(pool, self.policy.quantizer.storage == "packed")
            layers = support.check_layers(runner.model, pool.layer_num)
            metrics = Metrics() if self.policy.report.prometheus and "PROMETHEUS_MULTIPROC_DIR" in os.environ else None
            ranks = attention_ranks()
            geometry = read_geometry(runner, backend, ranks.rank, ranks.size, own)
            scales = backend_scales(layers, runner.server_args.attention_backend) if own else {}
            if own and geometry.device != "cpu":
                support.check_flashinfer_cache(backend, scales)
            tables = None
            if self.quantizer.space == "pre_rope":
                found = rotary_modules(runner.model, self.policy.quantizer.layers_of(geometry.layers))
                tables = rotary_tables(found, geometry.head_dim, runner.dtype, geometry.device)
            self.runtime = SglangRuntime(
                self.policy,
                self.quantizer,
                geometry,
                pool,
                metrics,
                ranks,
                scales,
                tables,
                runner.req_to_token_pool,
            )
        if self.policy.quantizer.storage != "packed":  # which our own kernels attend
            pool = runner.token_to_kv_pool
            layers = support.check_layers(runner.model, pool.layer_num)
            windows.check_backend(layers, backend)
            if not self.policy.meters_engine:
                compared = check_attention(backend, layers, runner.req_to_token_pool, pool, runner.dtype)
                self.runtime.compared += compared
        return self.runtime

    def after_cell_size(self, result: int, configurator: Any, kvc: Any, num_layers: int) -> int:
        """Count the witnesses and row ids as bytes of a token, so that they are taken off the capacity."""
        if self.policy.quantizer.storage == "packed":
            return packed_bytes_per_token(self.quantizer, kvc, num_layers)
        return result + side_bytes_per_token(self.policy, kvc, num_layers)

    def around_forward(
        self, original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.runtime is None:
            return original(runner, forward_batch, *args, **kwargs)
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
        if self.runtime is not None and pool is self.runtime.pool:
            self.runtime.moved(tgt_loc, src_loc)

    def after_load(self, _result: Any, pool: Any, _copy: Any, indices: Any, *_args: Any, **_kwargs: Any) -> None:
        if self.runtime is not None and pool is self.runtime.pool:
            self.runtime.overwritten(indices)

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
            print(banner(runtime, answers='meta_info["witcert"]', metrics=metrics), file=sys.stderr, flush=True)
        return {**result, "witcert": runtime.status()}

    def live_runtime(self) -> SglangRuntime:
        """The runtime, or SystemExit: without it the server would serve unmetered."""
        if self.runtime is None:
            raise SystemExit(
                "witcert: the attention backend in use is not a metered one, so nothing is served; "
                f"use --attention-backend {' or '.join(support.BACKENDS)}"
            )
        return self.runtime


def no_fused_write(_original: Callable[..., Any], *_args: Any, **_kwargs: Any) -> bool:
    """Models ask this before they fuse the write of keys into the rotary embedding, past the quantizer."""
    return False


def no_beams(_original: Callable[..., Any], *_args: Any, **_kwargs: Any) -> str:
    """What a client that asks for a beam search is told: only the first beam is a request that SGLang names."""
    return "witcert: beam search: the rows of the other beams are not planned; leave beam_width out"


def is_main_process() -> bool:
    """Whether this process serves clients: SGLang's others load their plugins inside the functions they are made for.

    Its parent says nothing: programs also start servers and engines in child processes of their own.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name not in _WORKERS:
        frame = frame.f_back
    return frame is None


def check_kind_early(server_args: Any) -> None:
    """Raise UnsupportedError for a model directory of a kind that SGLang, resolving its options, may trip over first.

    What cannot be read before the options are resolved is left to SGLang, and to the checks after that.
    """
    from sglang.srt.configs.model_config import ModelConfig

    if not Path(server_args.model_path).expanduser().is_dir():
        return
    try:
        config = ModelConfig.from_server_args(server_args)
    except support.unreadable_errors():
        return
    support.check_kind(config)


def model_config(server_args: Any) -> Any:
    """SGLang's `ModelConfig` of the model that will be served; UnsupportedError where SGLang cannot read it."""
    from sglang.srt.configs.model_config import ModelConfig

    try:
        return ModelConfig.from_server_args(server_args)
    except support.unreadable_errors() as error:
        raise UnsupportedError(f"--model-path {unreadable(server_args.model_path, error).text}") from error


def install(policy_path: str) -> None:
    """Read the policy and hook this process; called by `witcert_sglang.load`."""
    support.check_version()
    policy = load_policy(policy_path)
    quantizer = policy.resolved_quantizer
    installation = Installation(policy, quantizer)
    for name in support.BACKENDS:
        ATTENTION_BACKENDS[name] = metered_factory(ATTENTION_BACKENDS[name], installation.make_runtime)
    register(installation.hooks())
