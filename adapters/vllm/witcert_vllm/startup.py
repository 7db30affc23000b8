"""Turns the meter on in `VllmConfig`, and refuses what it cannot follow before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config.kv_transfer import KVTransferConfig

from witcert_core import Policy
from witcert_core.errors import WitCertError
from witcert_core.serving import (
    GROUP_ROWS,
    Grouped,
    check_declared,
    check_served,
    check_writable,
    in_one_line,
    prepare_kernels,
    refuse,
    refuse_on_error,
)
from witcert_vllm.backend import STOCK, take_over
from witcert_vllm.installation import current
from witcert_vllm.refusals.model import DECLARED, ROWS, VllmModel
from witcert_vllm.refusals.server import (
    BACKENDS,
    WORKERS,
    Resolved,
    check_config,
    check_connector,
    check_engine_args,
    check_resolved,
)

CONNECTOR = "WitCertConnector"
_CONNECTOR_MODULE = "witcert_vllm.connector"


def around_create_engine_config(original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> Any:
    """`EngineArgs.create_engine_config` with the metered worker, scheduler and connector chosen.

    An error of vLLM's own in between stays vLLM's.
    """
    policy = refuse_on_error(current)
    given = args.kv_cache_dtype  # what vLLM takes from the model's files is not the user's
    refuse_on_error(_before, policy, args)
    try:
        config = original(args, *rest, **kwargs)
    except WitCertError as error:  # of a metered class that vLLM looked up
        raise SystemExit(f"witcert: {in_one_line(error)}") from error
    return refuse_on_error(_after, policy, config, given)


def _before(policy: Policy, args: Any) -> None:
    """Refuses options, and puts our connector beside the user's."""
    take_over(BACKENDS)
    check_engine_args(args)
    if not (args.hf_overrides or args.hf_config_path):  # else its files do not say what it is
        check_declared(args.model, policy, args.kv_cache_dtype, DECLARED)
    if not has_own(args.kv_transfer_config):
        check_connector(args.kv_transfer_config, policy)
        args.kv_transfer_config = with_connector(args.kv_transfer_config)


def _after(policy: Policy, config: Any, kv_cache_dtype: str) -> Any:
    """Refuses what vLLM made of them and of the model's files, and chooses the worker and the scheduler."""
    check_resolved(config)
    model = VllmModel(config.model_config, policy, config.device_config.device_type, kv_cache_dtype=kv_cache_dtype)
    check_served(model, ROWS)
    refuse(GROUP_ROWS, expected_groups(model, config))
    check_config(Resolved(config, policy, STOCK))
    if policy.report.jsonl:
        check_writable(policy.report.jsonl)
    prepare_kernels(config.device_config.device_type)
    parallel, scheduler = config.parallel_config, config.scheduler_config
    parallel.worker_cls = WORKERS[parallel.worker_cls]
    kind = "MeteredAsyncScheduler" if scheduler.async_scheduling else "MeteredScheduler"
    scheduler.scheduler_cls = f"witcert_vllm.scheduler.{kind}"
    return config


def expected_groups(model: VllmModel, config: Any) -> Grouped:
    """The cache groups that there will be: one of each shape of layers, with a window or without one. vLLM keeps every
    token beside full attention where its hybrid manager is off."""
    every, windows = model.attention.layers, [layer.window for layer in model.attention.windows if layer.window]
    mixed, shapes = 0 < len(windows) < len(every), len(model.attention.shapes)
    if not windows or (mixed and config.scheduler_config.disable_hybrid_kv_cache_manager):
        return Grouped(model.policy, shapes, shapes, None)
    return Grouped(model.policy, max(shapes, 1 + mixed), shapes, min(windows) - 1)


def own_connector(beside: bool) -> dict[str, Any]:
    """Our connector as `--kv-transfer-config` would name it; `beside` another one, which may load tokens.

    A producer alone: for a consumer vLLM holds back the blocks of ended requests while batches overlap, so that its
    prefix cache cannot be reset under load, and takes multi-modal embeddings from clients.
    """
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": _CONNECTOR_MODULE,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"beside": beside},
    }


def has_own(transfer_config: Any) -> bool:
    """Whether our connector is there already (the config of one server may be made more than once)."""
    return transfer_config is not None and bool(transfer_config.has_connector(CONNECTOR))


def with_connector(transfer_config: Any) -> KVTransferConfig:
    """Ours alone, or beside the user's under vLLM's `MultiConnector`; ours comes first and never offers tokens."""
    if transfer_config is None or transfer_config.kv_connector is None:
        return KVTransferConfig(**own_connector(beside=False))
    if transfer_config.kv_connector == "MultiConnector":
        others = list(transfer_config.kv_connector_extra_config.get("connectors", []))
    else:
        others = [
            {
                "kv_connector": transfer_config.kv_connector,
                "kv_connector_module_path": transfer_config.kv_connector_module_path,
                "kv_role": transfer_config.kv_role,
                "kv_connector_extra_config": transfer_config.kv_connector_extra_config,
            }
        ]
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role=transfer_config.kv_role,
        engine_id=transfer_config.engine_id,
        kv_load_failure_policy=transfer_config.kv_load_failure_policy,
        kv_connector_extra_config={"connectors": [own_connector(beside=True), *others]},
    )
