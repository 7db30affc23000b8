"""Installs the meter in one vLLM process: every function wrapped, in one table, and the backends overridden.

vLLM has official places for most of it (attention backends, worker class, scheduler class, KV connector). They are
chosen in `VllmConfig`, so one wrapped function, the one that makes that config, turns everything on; four more serve
HTTP clients.
"""

from __future__ import annotations

from witcert_vllm import http
from witcert_vllm.backend import take_over
from witcert_vllm.hooks import Hook, apply
from witcert_vllm.installation import read_policy
from witcert_vllm.refusals.server import BACKENDS
from witcert_vllm.scheduler import around_collective_rpc
from witcert_vllm.startup import around_create_engine_config


def hooks() -> list[Hook]:
    """All of them."""
    return [
        Hook(
            "vllm.engine.arg_utils.EngineArgs.create_engine_config",
            around_create_engine_config,
            ("self", "usage_context"),
        ),
        Hook(
            "vllm.v1.engine.core.EngineCore.collective_rpc",
            around_collective_rpc,
            ("self", "method", "timeout", "args", "kwargs"),
        ),
        Hook(
            "vllm.entrypoints.launchers.app.init_entrypoints_middleware",
            http.around_init_middleware,
            ("args", "app", "supported_tasks"),
        ),
        Hook(
            "vllm.v1.engine.output_processor.OutputProcessor.add_request",
            http.around_add_request,
            ("self", "request", "prompt", "parent_req", "request_index"),
        ),
        Hook(
            "vllm.v1.engine.output_processor.OutputProcessor.process_outputs",
            http.around_process_outputs,
            ("self", "engine_core_outputs"),
        ),
    ]


def install(policy_path: str) -> None:
    """Read the policy and put the meter into this process; `witcert_vllm.load` calls it.

    A second call reads the policy again; it holds for engines made afterwards.
    """
    read_policy(policy_path)
    take_over(BACKENDS)
    for hook in hooks():
        apply(hook)
