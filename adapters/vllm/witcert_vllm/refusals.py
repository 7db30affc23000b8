"""What this adapter meters and what it refuses, by name.

Every refusal is one line: what was asked for, why it cannot be metered, what to change. The same list for people is
in docs/limits.md. What the engine's options say is checked before anything is started, what only the model's layers
and their cache show in the worker, before the first request.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from packaging.specifiers import SpecifierSet

from witcert_core.cache.schedule import QuantizeSchedule
from witcert_core.errors import UnsupportedError
from witcert_core.policy.model import Policy
from witcert_core.quantizers.base import Quantizer
from witcert_core.quantizers.conformance import check_quantizer
from witcert_core.serving.models.attention import WHY, describe
from witcert_vllm.pool import FLOAT8, PER_TOKEN_HEAD

VLLM_RANGE = SpecifierSet("==0.32.0")
BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "CUSTOM")
READ_BACK = (*FLOAT8, *PER_TOKEN_HEAD)
"""Values of `--kv-cache-dtype` whose cache is metered under `quantizer.name: engine`."""
HEAD_DIMS = range(16, 257, 16)
WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "witcert_vllm.cpu_worker.MeteredCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "witcert_vllm.gpu_worker.MeteredGPUWorker",
}

_SPECULATIVE = "speculative decoding: verified rows are not metered"
# Engine option -> (value that is fine, why the rest is refused).
REFUSED_OPTIONS: dict[str, tuple[Any, str]] = {
    "pipeline_parallel_size": (1, "pipeline parallelism: layers of other ranks would be missing from the report"),
    "data_parallel_size": (1, "data parallelism: requests of other replicas would be missing from the report"),
    "decode_context_parallel_size": (1, "decode context parallelism: a rank sees a part of the tokens only"),
    "prefill_context_parallel_size": (1, "prefill context parallelism: a rank sees a part of the tokens only"),
    "speculative_config": (None, _SPECULATIVE),
    "spec_method": (None, _SPECULATIVE),
    "spec_model": (None, _SPECULATIVE),
    "spec_tokens": (None, _SPECULATIVE),
    "kv_offloading_size": (None, "KV offloading: it moves keys without their witnesses"),
    "kv_sharing_fast_prefill": (False, "fast prefill over shared KV: its rows are not planned"),
    "enable_dbo": (False, "dual-batch overlap: half-batches are not planned"),
    "_api_process_count": (1, "several API servers: each would know a part of the requests only"),
    "scheduler_cls": (None, "a scheduler class of your own: results are handed over by the metered one"),
    "worker_cls": ("auto", "a worker class of your own: the meter lives in the metered one"),
}


def check_version() -> None:
    """Raise UnsupportedError unless the installed vLLM is one this adapter was tested with."""
    import vllm

    installed = vllm.__version__
    if not VLLM_RANGE.contains(installed, prereleases=True):
        raise UnsupportedError(
            f"vLLM {installed} is installed; witcert-vllm was tested with vLLM {VLLM_RANGE}: "
            "install that version, or unset WITCERT_POLICY to serve without a meter"
        )


def unreadable_errors() -> tuple[type[Exception], ...]:
    """What vLLM and Transformers raise over a configuration that is none, or lacks what their code asks of it."""
    from huggingface_hub.errors import StrictDataclassError

    usual = (OSError, ValueError, TypeError, AttributeError, KeyError, RuntimeError, ArithmeticError, AssertionError)
    return (*usual, StrictDataclassError)


def check_sharing(quantizer: Quantizer, cache_config: Any) -> None:
    """Raise UnsupportedError if requests could share a part of what the quantizer takes together."""
    rule = QuantizeSchedule.of(quantizer)
    if cache_config.enable_prefix_caching:
        rule.check_sharing(cache_config.block_size, f"--block-size {rule.sharing_unit} or --no-enable-prefix-caching")


def check_engine_args(args: Any) -> None:
    """Raise UnsupportedError for options of vLLM's `EngineArgs` under which the meter would not see everything."""
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") != "0":
        raise UnsupportedError(
            "VLLM_USE_RUST_FRONTEND: clients are served past the Python server, which puts summaries on answers and "
            "keeps them; unset it, or unset WITCERT_POLICY"
        )
    for option, (allowed, why) in REFUSED_OPTIONS.items():
        value = getattr(args, option)
        if value != allowed and (value or allowed):  # unset options are None or False
            flag = "--" + option.removeprefix("_api_process_count").replace("_", "-")
            flag = "--api-server-count" if option == "_api_process_count" else flag
            raise UnsupportedError(f"{flag} {value}: {why}; use {allowed!r} or unset WITCERT_POLICY")


def check_resolved(config: Any) -> None:
    """Raise UnsupportedError for what no option asked for: models name speculators, VLLM_DP_SIZE makes replicas."""
    speculative = config.speculative_config
    found = {
        "speculative_config": None if speculative is None else speculative.method,
        "data_parallel_size": config.parallel_config.data_parallel_size,
    }
    for option, value in found.items():
        allowed, why = REFUSED_OPTIONS[option]
        if value != allowed:
            raise UnsupportedError(
                f"{option} became {value!r} without an option for it (by the model's files or the environment): {why}; "
                "serve it without that, or unset WITCERT_POLICY"
            )


def check_connector(transfer_config: Any, policy: Policy) -> None:
    """Raise UnsupportedError for a KV connector beside which tokens would be read whose error nobody knows."""
    if transfer_config is None:
        return
    name = transfer_config.kv_connector
    if policy.quantizer.storage == "packed":
        raise UnsupportedError(
            f"--kv-transfer-config with {name}: it would carry packed pages without the dither rows they were written "
            "with; set quantizer.storage to 'simulated' or leave the connector out"
        )
    if policy.repairs:
        raise UnsupportedError(
            f"--kv-transfer-config with {name} under a gate that repairs: blocks it loads have no exact copy to repair "
            "from; set gate.kind to 'observe' or leave the connector out"
        )


def check_config(config: Any, policy: Policy, stock: Mapping[str, str]) -> None:
    """Raise UnsupportedError for a resolved `VllmConfig` the meter does not follow; stock: see `backend.STOCK`."""
    device = config.device_config.device_type
    if policy.meters_engine:
        check_engine_cache(
            config.cache_config.cache_dtype, config.model_config.dtype, policy.prefill_reads, device, stock
        )
    else:
        check_cache_dtype(config.cache_config.cache_dtype, config.model_config.dtype)
    if policy.quantizer.storage == "packed" and config.cache_config.cache_dtype != "auto":
        raise UnsupportedError(
            f"quantizer.storage: packed with --kv-cache-dtype {config.cache_config.cache_dtype}: pages hold the codes "
            "of the policy's quantizer; use --kv-cache-dtype auto, or set quantizer.storage to 'simulated'"
        )
    if config.parallel_config.worker_cls not in WORKERS:
        raise UnsupportedError(
            f"worker class {config.parallel_config.worker_cls!r} is not metered; metered are vLLM's CPU and GPU workers"
        )
    if config.scheduler_config.scheduler_cls is not None:
        raise UnsupportedError(
            f"this model is scheduled by {config.scheduler_config.scheduler_cls!r}; metered are vLLM's own schedulers"
        )


def check_bypass(quantizer: Quantizer, model: Any) -> None:
    """Raise UnsupportedError for outliers in 16 bit under a model that has more, or more pairs than there are."""
    name, pairs, head_dim = quantizer.name, quantizer.bypass_pairs, model.get_head_size()
    if pairs and model.dtype == torch.float32:
        raise UnsupportedError(
            f"quantizer.name: {name} keeps outlier channels in 16 bit, but the model is float32; use --dtype bfloat16"
        )
    if pairs > head_dim // 2:
        raise UnsupportedError(
            f"quantizer.params: {name} bypasses {pairs} channel pairs; a head of {head_dim} channels has "
            f"{head_dim // 2}"
        )


def model_checks(model: Any, policy: Policy, quantizer: Quantizer, device: str) -> list[tuple[str, Callable[[], Any]]]:
    """What a model is checked for, in order and by subject: the server's verdict at its start, and the doctor's.

    model: vLLM's `ModelConfig`.
    """
    layers = range(model.get_total_num_hidden_layers())
    return [
        ("model", lambda: check_model(model, device)),
        ("outliers", lambda: check_bypass(quantizer, model)),
        ("head size", lambda: check_quantizer(quantizer, model.get_head_size())),
        ("quantizer.layers", lambda: policy.quantizer.layers_of(layers)),
        ("meter.layers", lambda: policy.meter.layers_of(layers)),
    ]


def check_served_model(model: Any, policy: Policy, quantizer: Quantizer, device: str) -> None:
    """All of `model_checks`: raises the error of the first that refuses."""
    for _subject, check in model_checks(model, policy, quantizer, device):
        check()


def check_model(model: Any, device: str) -> None:
    """Raise UnsupportedError for an architecture, head size or dtype the meter has no radii for.

    `check_specs` and `attention_layers` look at the layers themselves, but in a worker, long after the start.
    """
    name = str((getattr(model.hf_config, "architectures", None) or ["this model"])[0])
    if model.runner_type != "generate":
        raise UnsupportedError(f"{name} does not generate text; metered are generating models")
    attention = describe(model.hf_config, name, model.hf_text_config)
    attention.refuse("none", "state", "shared", "chunked", "shapes", "widths", "diffusion", "bidirectional", "alibi")
    attention.refuse(
        "sliding",
        instead="metered are layers that keep every token in the cache (--disable-sliding-window, where the window is "
        "as long as you need)",
    )
    if model.use_mla:
        raise UnsupportedError(f"{name} {WHY['mla']}")
    if model.is_encoder_decoder:
        raise UnsupportedError(f"{name} {WHY['encoder-decoder']}")
    if model.is_diffusion:
        raise UnsupportedError(f"{name} {WHY['diffusion']}; metered are causal models")
    if model.is_hybrid or model.is_attention_free:
        raise UnsupportedError(f"{name} {WHY['none']}; metered are models of attention layers only")
    if device != "cpu" and model.dtype == torch.float32:
        raise UnsupportedError(
            f"{name} in float32 on {device!r}: the engine multiplies in TF32 there, whose rounding no radius covers; "
            "use --dtype bfloat16 or float16"
        )
    head_dim = model.get_head_size()
    if head_dim not in HEAD_DIMS:
        raise UnsupportedError(
            f"{name} has head_dim {head_dim}; metered are multiples of 16 from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"
        )


def untried_device(device: str) -> str:
    """What is said of a device on which nothing here has run; '' where nothing is to be said."""
    if device == "cpu":
        return ""
    return (
        f"the kernels that serve and meter under vLLM on {device!r} were compiled and interpreted, and never run on a "
        "GPU; set meter.audit_every to have their outputs and bounds compared while you try them"
    )


def check_cache_dtype(cache_dtype: str, model_dtype: torch.dtype) -> None:
    """Raise UnsupportedError for a cache that rounds before the quantizer does."""
    if cache_dtype in ("auto", str(model_dtype).removeprefix("torch.")):
        return
    if cache_dtype in ("float16", "bfloat16"):
        raise UnsupportedError(
            f"--kv-cache-dtype {cache_dtype} under a {str(model_dtype).removeprefix('torch.')} model: it would round "
            "before the quantizer does; use --kv-cache-dtype auto"
        )
    instead = "set quantizer.name to 'engine' to meter that cache, or use" if cache_dtype in READ_BACK else "use"
    raise UnsupportedError(
        f"--kv-cache-dtype {cache_dtype} quantizes behind the policy's quantizer; {instead} --kv-cache-dtype auto"
    )


def check_engine_cache(
    cache_dtype: str, model_dtype: torch.dtype, prefill_reads: str, device: str, stock: Mapping[str, str]
) -> None:
    """Raise UnsupportedError where vLLM's own cache cannot be metered as its attention reads it."""
    if cache_dtype in ("auto", "float16", "bfloat16", str(model_dtype).removeprefix("torch.")):
        raise UnsupportedError(
            f"quantizer.name: engine, but --kv-cache-dtype {cache_dtype} quantizes nothing; start the server with the "
            "--kv-cache-dtype to be metered"
        )
    if cache_dtype not in READ_BACK:
        why = "what attention reads of it is not known"
        if cache_dtype.startswith("turboquant"):
            why = (
                "vLLM's TURBOQUANT backend, which alone reads it, needs a GPU, and its chunks read some of their own "
                "keys exactly and some as stored; on a CPU vLLM takes the name and stores something else"
            )
        raise UnsupportedError(
            f"--kv-cache-dtype {cache_dtype} cannot be metered: {why}; use one of {', '.join(READ_BACK)}, or unset "
            "WITCERT_POLICY"
        )
    if device != "cpu":
        raise UnsupportedError(
            f"quantizer.name: engine on device {device!r}: kernels there round attention weights to the cache's dtype, "
            "which no radius covers yet; name the cast in the policy instead (quantizer.name: fp8_e4m3_cast) and start "
            "with --kv-cache-dtype auto"
        )
    if cache_dtype.endswith("_per_token_head") and stock["CPU_ATTN"].endswith(".CPUAttentionBackend"):
        raise UnsupportedError(
            f"--kv-cache-dtype {cache_dtype} with CPU_ATTN: vLLM accepts it there and stores something else; "
            "use --kv-cache-dtype fp8"
        )
    if prefill_reads != "stored":
        raise UnsupportedError(
            "quantizer.name: engine: vLLM's prompt chunks read what they stored: set prefill_reads to 'stored'"
        )


def check_specs(specs: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for cache layers that are not one plain row a token (`KVCacheSpec` by layer name)."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    for name, spec in specs.items():
        if type(spec) is not FullAttentionSpec:
            raise UnsupportedError(
                f"layer {name} keeps its cache as {type(spec).__name__}; metered is FullAttentionSpec "
                "(every token of every layer stays in the cache)"
            )


def attention_layers(vllm_config: Any) -> dict[str, Any]:
    """vLLM's attention layers by name, in order; UnsupportedError for one that does more than causal softmax."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backend import AttentionType

    every = vllm_config.compilation_config.static_forward_context
    layers = {name: layer for name, layer in every.items() if isinstance(layer, AttentionLayerBase)}
    for name, layer in layers.items():
        if type(layer) is not Attention:
            raise UnsupportedError(f"layer {name} is a {type(layer).__name__}; metered is plain Attention")
        impl = layer.impl
        for odd, what in (
            (not hasattr(impl, "witcert_metered"), f"backend {layer.attn_backend.__name__}, which is not wrapped"),
            (layer.attn_type != AttentionType.DECODER, f"{layer.attn_type} attention"),
            (layer.kv_sharing_target_layer_name is not None, "the cache of another layer"),
            (getattr(layer, "sliding_window", None) is not None, "a sliding window"),
            (getattr(impl, "alibi_slopes", None) is not None, "ALiBi in the logits"),
            (getattr(impl, "chunk_lookback", -1) not in (-1, None), "chunked local attention"),
            (layer.head_size != layer.head_size_v, "values wider or narrower than keys"),
        ):
            if odd:
                raise UnsupportedError(f"attention layer {name} uses {what}, which the meter does not follow")
    shapes = {(layer.num_heads, layer.num_kv_heads, layer.head_size) for layer in layers.values()}
    if len(shapes) != 1:
        raise UnsupportedError(f"the model's layers have {len(shapes)} shapes of heads; metered are models with one")
    return layers


def unknown_runner(runner: Any) -> UnsupportedError:
    """For a model runner that is neither V1 nor V2."""
    return UnsupportedError(
        f"model runner {type(runner).__name__} has no known place that names the requests of a pass; install the vLLM "
        "version that docs/limits.md names, or unset WITCERT_POLICY to serve without a meter"
    )
