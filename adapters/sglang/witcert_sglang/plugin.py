"""Installs the meter in one SGLang process: every function hooked, in one table, and the backends wrapped."""

from __future__ import annotations

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

from witcert_core import Policy, load_policy
from witcert_sglang import http, packed
from witcert_sglang.backend import metered_factory, no_fused_write
from witcert_sglang.hooks import Hook, register
from witcert_sglang.refusals.server import BACKENDS
from witcert_sglang.startup import MainProcess, is_main_process
from witcert_sglang.worker import SchedulerProcess, no_beams

_MODEL_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_POOLS = tuple(f"sglang.srt.mem_cache.memory_pool.{name}" for name in ("MHATokenToKVPool", "MLATokenToKVPool"))
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_ABORTED = f"{_SCHEDULER}.send_abort_output"
_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_CELL_SIZE = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size"
_WINDOW_SIZES = "sglang.srt.model_executor.pool_configurator.HybridSWAPoolConfigurator.__init__"
_CONFIGURE_DTYPE = "sglang.srt.mem_cache.kv_cache_dtype.configure_kv_cache_dtype"
_BUILD_METHOD = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mha_quant_method"
_CONTROL = f"{_SCHEDULER}.handle_dumper_control"
_BEAMS = "sglang.srt.beam_search.coordinator.BeamCoordinator.validate_and_init"
_FUSED_WRITE = "sglang.srt.models.utils.enable_fused_set_kv_buffer"
_LAUNCH = "sglang.srt.entrypoints.engine.Engine._launch_subprocesses"
_SERVE = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
_SERVE_PARAMETERS = ("server_args", "tokenizer_manager", "template_manager", "port_args", "scheduler_infos")


def hooks(policy: Policy, scheduler: SchedulerProcess) -> list[Hook]:
    """All hooks; those of the main process serve HTTP clients and the start-up checks."""
    main = MainProcess(policy)
    every = [
        Hook(_CELL_SIZE, "after", scheduler.after_cell_size, "every", ("self", "kvc", "num_layers")),
        Hook(_WINDOW_SIZES, "after", scheduler.after_window_sizes, "every", ("self", "kvc")),
        Hook(f"{_MODEL_RUNNER}.forward", "around", scheduler.around_forward, "every", ("self", "forward_batch")),
        Hook(
            f"{_MODEL_RUNNER}.sample",
            "after",
            scheduler.after_sample,
            "every",
            ("self", "logits_output", "forward_batch"),
        ),
        Hook(
            f"{_MODEL_RUNNER}.compute_logprobs_only",
            "after",
            scheduler.after_sample,
            "every",
            ("self", "logits_output", "forward_batch"),
        ),
        Hook(_FUSED_WRITE, "around", no_fused_write, "every", ("forward_batch",)),
        *(
            Hook(f"{pool}.move_kv_cache", "after", scheduler.after_move, "every", ("self", "tgt_loc", "src_loc"))
            for pool in _POOLS
        ),
        *(
            Hook(f"{pool}.load_cpu_copy", "after", scheduler.after_load, "every", ("self", "kv_cache_cpu", "indices"))
            for pool in _POOLS
        ),
        Hook(f"{_SCHEDULER}.get_output_streamer_class", "after", scheduler.after_streamer_class, "every", ("self",)),
        Hook(f"{_SCHEDULER}.get_init_info", "after", scheduler.after_init_info, "every", ("self",)),
        Hook(_ABORTED, "after", scheduler.after_abort_output, "every", ("self", "abort_req", "req")),
        Hook(f"{_SCHEDULER}.run_batch", "before", scheduler.before_run_batch, "every", ("self", "batch")),
        Hook(_CONTROL, "around", scheduler.around_control, "every", ("self", "recv_req")),
        Hook(_BEAMS, "around", no_beams, "every", ("self", "req", "recv_req")),
    ]
    if policy.quantizer.storage == "packed":
        every += [
            Hook(_CONFIGURE_DTYPE, "around", packed.around_configure_dtype, "every", ("server_args_kv_cache_dtype",)),
            Hook(
                _BUILD_METHOD,
                "around",
                packed.around_build_method(policy),
                "every",
                ("self", "num_layers"),
            ),
        ]
    of_main = [
        Hook(f"{_SERVER_ARGS}.resolve_once", "before", main.before_resolve, "main", ("self",)),
        Hook(f"{_SERVER_ARGS}.check_server_args", "after", main.after_check_server_args, "main", ("self",)),
        Hook(_LAUNCH, "after", main.after_launch, "main", ("cls", "server_args")),
        Hook(_SERVE, "before", main.before_http, "main", _SERVE_PARAMETERS),
        *http.hooks(policy),
    ]
    return every + (of_main if is_main_process() else [])


def install(policy_path: str) -> None:
    """Read the policy and hook this process; `witcert_sglang.load` calls it."""
    policy = load_policy(policy_path)
    scheduler = SchedulerProcess(policy)
    for name in BACKENDS:
        ATTENTION_BACKENDS[name] = metered_factory(ATTENTION_BACKENDS[name], scheduler.make_runtime)
    register(hooks(policy, scheduler))
