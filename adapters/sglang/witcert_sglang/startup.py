"""What the main process does before and while a server starts: refuse what cannot be metered, and see that it is."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from witcert_core import Policy
from witcert_core.errors import UnsupportedError
from witcert_core.serving import (
    GROUP_ROWS,
    Grouped,
    check_declared,
    check_served,
    check_writable,
    prepare_kernels,
    refuse,
    refuse_on_error,
    unreadable,
    unreadable_errors,
)
from witcert_sglang import http
from witcert_sglang.refusals.model import ARCH_ROWS, DECLARED, ROWS, SglangModel
from witcert_sglang.refusals.server import Server, check_model_path, check_options, check_port

_WORKERS = ("run_scheduler_process", "run_detokenizer_process", "run_data_parallel_controller_process")


class MainProcess:
    """The hooks of the process that clients talk to."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def before_resolve(self, server_args: Any, *_args: Any, **_kwargs: Any) -> None:
        refuse_on_error(check_model_path, server_args.model_path)
        if server_args.json_model_override_args in (None, "", "{}"):  # else its files do not say what it is
            path, dtype = server_args.model_path, server_args.kv_cache_dtype
            refuse_on_error(check_declared, path, self.policy, dtype, DECLARED)
        refuse_on_error(check_kind_early, self.policy, server_args)

    def after_check_server_args(self, _result: Any, server_args: Any) -> None:
        args = refuse_on_error(checked_options, self.policy, server_args)
        config = refuse_on_error(model_config, server_args)
        refuse_on_error(check_model, self.policy, config, args)
        if self.policy.report.jsonl:
            refuse_on_error(check_writable, self.policy.report.jsonl)
        refuse_on_error(check_port, args.host, args.port)
        prepare_kernels(args.device)

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
        self.expect_meter(scheduler_infos)
        http.add_routes(self.policy)

    def expect_meter(self, infos: Any) -> None:
        """The scheduler must have said that it is metered; a server that is not is stopped here."""
        from sglang.srt.utils.common import kill_process_tree

        status = infos[0].get("witcert") if infos else None
        if status is None:
            kill_process_tree(os.getpid(), include_parent=False)
            raise SystemExit(
                "witcert: the scheduler process came up without the meter (see its log above), so nothing is served; "
                "unset WITCERT_POLICY to serve without it"
            )
        http.STATE.status = status


def checked_options(policy: Policy, server_args: Any) -> Any:
    """The server's options as SGLang resolved them; UnsupportedError for some that cannot be metered."""
    from sglang.srt.arg_groups.overrides import resolved_view

    args = resolved_view(server_args)
    check_options(Server(args, policy))
    return args


def check_model(policy: Policy, config: Any, args: Any) -> None:
    """Raise what refuses a model (SGLang's `ModelConfig`) under the server's options as SGLang resolved them."""
    cache_dtype = "auto" if policy.meters_engine else args.kv_cache_dtype
    model = SglangModel(config, policy, args.device, args.attention_backend, kv_cache_dtype=cache_dtype)
    check_served(model, ROWS)
    windows = [layer.window for layer in model.attention.windows if layer.window]
    if config.is_hybrid_swa and windows:
        shapes = len(model.attention.shapes)
        refuse(GROUP_ROWS, Grouped(policy, 1 + (len(windows) < len(model.layers)), shapes, min(windows) - 1))


def is_main_process() -> bool:
    """Whether this process serves clients: SGLang's others load their plugins inside the functions they are made for.

    Its parent says nothing: programs also start servers and engines in child processes of their own.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name not in _WORKERS:
        frame = frame.f_back
    return frame is None


def check_kind_early(policy: Policy, server_args: Any) -> None:
    """Raise UnsupportedError for a model directory of a kind that SGLang, resolving its options, may trip over first.

    What cannot be read before the options are resolved is left to SGLang, and to the checks after that.
    """
    from sglang.srt.configs.model_config import ModelConfig

    if not Path(server_args.model_path).expanduser().is_dir():
        return
    try:
        config = ModelConfig.from_server_args(server_args)
    except unreadable_errors():
        return
    refuse(ARCH_ROWS, SglangModel(config, policy, "cpu", ""))


def model_config(server_args: Any) -> Any:
    """SGLang's `ModelConfig` of the model that will be served; UnsupportedError where SGLang cannot read it."""
    from sglang.srt.configs.model_config import ModelConfig

    try:
        return ModelConfig.from_server_args(server_args)
    except unreadable_errors() as error:
        raise UnsupportedError(f"--model-path {unreadable(server_args.model_path, error).text}") from error
