"""Installs the meter in one vLLM process: every function wrapped, in one table, and the backends overridden.

vLLM has official places for most of it (attention backends, worker class, scheduler class, KV connector). They are
chosen in `VllmConfig`, so one wrapped function, the one that makes that config, turns everything on; three more serve
HTTP clients.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from witcert_core.errors import UnsupportedError
from witcert_vllm import backends, config, http, support
from witcert_vllm.installation import read_policy

_MARK = "__witcert_original__"


@dataclass(frozen=True)
class Wrapped:
    """A function of vLLM that is wrapped: `around(original, *args, **kwargs)` runs in its place.

    parameters: the leading parameter names it had when this adapter was written; the version contract compares them.
    """

    target: str
    around: Callable[..., Any]
    parameters: tuple[str, ...]


def around_init_middleware(original: Callable[..., None], args: Any, app: Any, *rest: Any, **kwargs: Any) -> None:
    """vLLM's application, when its guards stand and before it is closed, with `/witcert/status` and the summaries."""
    from witcert_vllm.routes import add_routes  # what it needs of vLLM, only the process that serves HTTP has

    original(args, app, *rest, **kwargs)
    add_routes(app)
    app.add_middleware(http.NamesAnswers)


def wrapped_functions() -> list[Wrapped]:
    """All of them."""
    return [
        Wrapped(
            "vllm.engine.arg_utils.EngineArgs.create_engine_config",
            config.around_create_engine_config,
            ("self", "usage_context"),
        ),
        Wrapped(
            "vllm.entrypoints.launchers.app.init_entrypoints_middleware",
            around_init_middleware,
            ("args", "app", "supported_tasks"),
        ),
        Wrapped(
            "vllm.v1.engine.output_processor.OutputProcessor.add_request",
            http.around_add_request,
            ("self", "request", "prompt", "parent_req", "request_index"),
        ),
        Wrapped(
            "vllm.v1.engine.output_processor.OutputProcessor.process_outputs",
            http.around_process_outputs,
            ("self", "engine_core_outputs"),
        ),
    ]


def wrap(item: Wrapped) -> None:
    """Put the wrapper in place, once; UnsupportedError if vLLM has no such function."""
    owner_name, _, name = item.target.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    original = getattr(owner, name, None)
    if original is None:
        raise UnsupportedError(
            f"vLLM has no {item.target}: this vLLM differs from the tested one; install the version that "
            "docs/limits.md names, or unset WITCERT_POLICY to serve without a meter"
        )
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return item.around(original, *args, **kwargs)

    setattr(wrapper, _MARK, original)
    setattr(owner, name, wrapper)


def install(policy_path: str) -> None:
    """Read the policy and put the meter into this process; called by `witcert_vllm.load`.

    A second call reads the policy again; it holds for engines made afterwards.
    """
    support.check_version()
    read_policy(policy_path)
    backends.take_over(support.BACKENDS)
    for item in wrapped_functions():
        wrap(item)
