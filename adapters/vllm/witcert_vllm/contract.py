"""Every private name of vLLM that this adapter relies on, and the check that each is still what it was.

The wrapped functions are in `plugin.py`, with the parameters they need; this table has the rest. `witcert doctor` and a
test read it.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable, Mapping

from witcert_vllm import refusals
from witcert_vllm.backend import BUILD, FORWARD, WRITE
from witcert_vllm.plugin import wrapped_functions

_V1 = "vllm.v1"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1"
_FORWARD = (*FORWARD, "output_scale")

SIGNATURES: dict[str, tuple[str, ...]] = {
    f"{_V1}.worker.gpu_model_runner.GPUModelRunner._prepare_inputs": ("self", "scheduler_output"),
    f"{_V1}.worker.gpu.model_runner.GPUModelRunner.prepare_attn": ("self", "input_batch"),
    f"{_V1}.attention.backends.registry.register_backend": ("backend", "class_path"),
    f"{_V1}.attention.backends.registry.AttentionBackendEnum.get_path": ("self", "include_classname"),
    f"{_V1}.attention.backend.AttentionBackend.customize_spec": ("spec",),
    f"{_V1}.attention.backend.AttentionBackend.supported_kv_cache_layouts": (),
    f"{_V1}.attention.backends.cpu_attn.CPUAttentionMetadataBuilder._set_isa_to_layers": ("self", "layer_names"),
    f"{_V1}.attention.backend.AttentionMetadataBuilder.build": (*BUILD, "fast_build"),
    f"{_V1}.attention.backends.cpu_attn.CPUAttentionBackendImpl.forward": _FORWARD,
    f"{_V1}.attention.backends.cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update": WRITE,
    f"{_V1}.attention.backends.triton_attn.TritonAttentionImpl.forward": _FORWARD,
    **{
        f"{_V1}.attention.backend.AttentionImpl.{name}": parameters
        for name, parameters in (
            ("fused_rope_kvcache_supported", ("self",)),
            ("fused_qk_norm_rope_kvcache_supported", ("self",)),
            ("fused_qk_norm_mrope_kvcache_supported", ("self",)),
            ("fused_output_quant_supported", ("self", "quant_key")),
        )
    },
    f"{_V1}.core.sched.scheduler.Scheduler.update_from_output": ("self", "scheduler_output", "model_runner_output"),
    f"{_V1}.core.sched.scheduler.Scheduler.finish_requests": ("self", "request_ids", "finished_status"),
    f"{_V1}.worker.gpu_worker.Worker.initialize_from_config": ("self", "kv_cache_config"),
    f"{_V1}.worker.gpu_worker.Worker.determine_available_memory": ("self",),
    f"{_CONNECTOR}.handle_preemptions": ("self", "kv_connector_metadata"),
    f"{_CONNECTOR}.get_finished": ("self", "finished_req_ids"),
    f"{_CONNECTOR}.build_connector_worker_meta": ("self",),
    f"{_CONNECTOR}.get_num_new_matched_tokens": ("self", "request", "num_computed_tokens"),
    f"{_CONNECTOR}.update_state_after_alloc": ("self", "request", "blocks", "num_external_tokens"),
    f"{_CONNECTOR}.request_finished": ("self", "request", "block_ids"),
    "vllm.model_executor.models.utils.extract_layer_index": ("layer_name",),
}
"""Function -> the parameters it begins with."""

FIELDS: dict[str, tuple[str, ...]] = {
    "vllm.engine.arg_utils.EngineArgs": (*refusals.REFUSED_OPTIONS, "kv_transfer_config"),
    f"{_V1}.attention.backend.CommonAttentionMetadata": (
        "query_start_loc_cpu",
        "seq_lens",
        "block_table_tensor",
        "slot_mapping",
        "causal",
        "is_prefilling",
        "mm_req_doc_ranges",
    ),
    f"{_V1}.outputs.KVConnectorOutput": ("kv_connector_worker_meta",),
    f"{_V1}.kv_cache_interface.FullAttentionSpec": ("state_content_bytes", "head_size", "num_kv_heads", "block_size"),
}
"""Dataclass -> fields that are read or set."""


def broken(
    signatures: Mapping[str, tuple[str, ...]] = SIGNATURES, fields: Mapping[str, tuple[str, ...]] = FIELDS
) -> list[str]:
    """One line for every name that vLLM no longer keeps, beginning with that name."""
    wrapped = {item.target: item.parameters for item in wrapped_functions()}
    return [*_changed({**signatures, **wrapped}.items()), *_gone(fields.items())]


def _changed(signatures: Iterable[tuple[str, tuple[str, ...]]]) -> list[str]:
    found = []
    for target, expected in signatures:
        owner, _, name = target.rpartition(".")
        try:
            function = inspect.unwrap(getattr(pkgutil.resolve_name(owner), name))
        except (ImportError, AttributeError) as error:
            found.append(f"{target}: {error}")
            continue
        has = tuple(inspect.signature(function).parameters)
        if has[: len(expected)] != expected:
            found.append(f"{target}: takes ({', '.join(has)}), expected ({', '.join(expected)}, ...)")
    return found


def _gone(fields: Iterable[tuple[str, tuple[str, ...]]]) -> list[str]:
    found = []
    for target, names in fields:
        try:
            has = pkgutil.resolve_name(target).__dataclass_fields__
        except (ImportError, AttributeError) as error:
            found.append(f"{target}: {error}")
            continue
        found += [f"{target}.{name}: no longer there" for name in names if name not in has]
    return found
