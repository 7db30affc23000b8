"""What this adapter meters and what it refuses, by name, before anything is started.

Every refusal is one line: what was asked for, why it cannot be metered, what to change. The same list for people is
in docs/limits.md.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from packaging.specifiers import SpecifierSet

from witcert_core.cache.schedule import QuantizeSchedule
from witcert_core.errors import UnsupportedError
from witcert_core.kernels.host.dispatch import interpreting
from witcert_core.policy.model import Policy
from witcert_core.quantizers.base import Quantizer
from witcert_core.quantizers.conformance import check_quantizer
from witcert_core.serving.models.attention import WHY, describe

SGLANG_RANGE = SpecifierSet("==0.5.23")
BACKENDS = ("torch_native", "triton", "flashinfer", "fa3")
CPU_BACKENDS = BACKENDS[:2]
HEAD_DIMS = range(16, 257, 16)

# Server option -> (value that is fine, why the rest is refused).
REFUSED_OPTIONS: dict[str, tuple[Any, str]] = {
    "pp_size": (1, "pipeline parallelism: layers of other ranks would be missing from the report"),
    "dp_size": (1, "data parallelism: requests of other replicas would be missing from the report"),
    "attn_dp_size": (1, "data-parallel attention: requests of other groups would be missing from the report"),
    "nnodes": (1, "several nodes: the start-up checks know the processes of one"),
    "dcp_size": (1, "decode context parallelism: a rank sees a part of the tokens only"),
    "attn_cp_size": (1, "context parallelism: a rank sees a part of the tokens only"),
    "speculative_algorithm": (None, "speculative decoding: verified rows are not metered"),
    "enable_hierarchical_cache": (False, "HiCache: it moves keys without their witnesses"),
    "enable_unified_cache_external_linker": (False, "an external KV store: it moves keys without their witnesses"),
    "enable_flexkv": (False, "FlexKV: it moves keys without their witnesses"),
    "radix_cache_backend": (None, "a prefix cache of another make: which slots requests share is not known"),
    "enable_lmcache": (False, "LMCache: it moves keys without their witnesses"),
    "disaggregation_mode": ("null", "prefill/decode disaggregation: it sends keys without their witnesses"),
    "enable_hisparse": (False, "sparse attention over a host cache: the tokens read are not known"),
    "enable_unified_memory": (False, "the unified memory pool: its slots are not the pool's rows"),
    "dllm_algorithm": (None, "diffusion language models: rows are not causal"),
    "enable_torch_compile": (False, "torch.compile: the meter's Python does not run in compiled passes"),
    "tokenizer_worker_num": (1, "several tokenizer processes: each would know a part of the requests only"),
    "smg_grpc_mode": (False, "a gRPC server of another package: its answers have no room for a summary"),
    "grpc_mode": (False, "a gRPC server of another package: its answers have no room for a summary"),
    "is_embedding": (False, "embedding models: their passes sample nothing, so no request would be reported"),
    "enable_tf32_matmul": (False, "TF32 products: no radius covers their rounding"),
    "enable_two_batch_overlap": (False, "two-batch overlap: half-batches are not planned"),
    "enable_mis": (False, "multi-item scoring: items do not see each other, which the meter does not follow"),
    "enable_pdmux": (False, "PD multiplexing: prefill and decode passes run at once; the meter follows one pass"),
}


def check_version() -> None:
    """Raise UnsupportedError unless the installed SGLang is one this adapter was tested with."""
    installed = version("sglang")
    if not SGLANG_RANGE.contains(installed, prereleases=True):
        raise UnsupportedError(
            f"SGLang {installed} is installed; witcert-sglang was tested with SGLang {SGLANG_RANGE}: "
            "install that version, or unset WITCERT_POLICY to serve without a meter"
        )


def check_sharing(quantizer: Quantizer, args: Any) -> None:
    """Raise UnsupportedError if requests could share a part of what the quantizer takes together."""
    rule = QuantizeSchedule.of(quantizer)
    if not args.disable_radix_cache:
        rule.check_sharing(args.page_size or 1, sharing_flags(rule))


def sharing_flags(rule: QuantizeSchedule) -> str:
    """The server options under which requests share whole groups only."""
    return f"--page-size {rule.sharing_unit} or --disable-radix-cache"


def unreadable_errors() -> tuple[type[Exception], ...]:
    """What SGLang and Transformers raise over a configuration that is none, or lacks what their code asks of it."""
    from huggingface_hub.errors import StrictDataclassError

    usual = (OSError, ValueError, TypeError, AttributeError, KeyError, RuntimeError, ArithmeticError, AssertionError)
    return (*usual, StrictDataclassError)


def check_model_path(model_path: str) -> None:
    """Raise UnsupportedError for a local model path that is not there (a hub id is left to SGLang)."""
    looks_local = model_path.startswith(("/", "./", "../", "~")) or model_path.count("/") > 1
    if looks_local and not Path(model_path).expanduser().exists():
        raise UnsupportedError(f"--model-path {model_path}: no such directory")


def check_server(args: Any, own_cache: bool = False) -> None:
    """Raise UnsupportedError for server options (resolved) under which the meter would not see everything.

    own_cache: the policy meters the engine's own quantized cache.
    """
    from sglang.srt.environ import envs

    for option, (allowed, why) in REFUSED_OPTIONS.items():
        value = getattr(args, option)
        if value != allowed and (value or allowed):  # unset options are None or False
            flag = "--" + option.replace("_", "-")
            raise UnsupportedError(f"{flag} {value}: {why}; use {allowed!r} or unset WITCERT_POLICY")
    if envs.SGLANG_RUST_SERVER.get():
        raise UnsupportedError(
            "SGLANG_RUST_SERVER: clients are served past the Python server, which puts the summaries on answers and "
            "keeps them; unset it, or unset WITCERT_POLICY"
        )
    if not own_cache and args.kv_cache_dtype not in ("auto", "bf16", "bfloat16"):
        raise UnsupportedError(
            f"--kv-cache-dtype {args.kv_cache_dtype} quantizes behind the policy's quantizer; set quantizer.name to "
            "'engine' to meter that cache, or use --kv-cache-dtype auto"
        )
    allowed_backends = CPU_BACKENDS if args.device == "cpu" else BACKENDS
    for backend in chosen_backends(args):
        if backend not in allowed_backends:
            raise UnsupportedError(
                f"attention backend {backend!r} is not metered; use --attention-backend {' or '.join(allowed_backends)}"
            )
        if backend == "triton" and args.device == "cpu" and not interpreting():
            raise UnsupportedError(
                "attention backend 'triton' on a CPU: its kernels need a GPU, so the first request would fail; use "
                "--attention-backend torch_native (or, slowly, TRITON_INTERPRET=1 in the server's environment)"
            )


def chosen_backends(args: Any) -> list[str]:
    """The attention backends a server was given, of prompts and of decode steps; none where SGLang still chooses."""
    options = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return [backend for backend in (getattr(args, option) for option in options) if backend is not None]


def check_graphs(policy: Policy, args: Any) -> None:
    """Raise UnsupportedError for captured graphs but those of decode steps over a packed pool read by kernels."""
    if args.device == "cpu":  # graphs there are torch.compile's, which is refused by its own name
        return
    decode, prefill = (getattr(args.cuda_graph_config, phase).backend for phase in ("decode", "prefill"))
    if decode == prefill == "disabled":
        return
    backends = args.attention_backend, args.decode_attention_backend or args.attention_backend
    for odd, what in (
        (
            policy.quantizer.storage != "packed" or backends != ("triton", "triton"),
            "CUDA graphs: replayed passes run no Python, so nothing would be measured but with quantizer.storage: "
            "packed and --attention-backend triton; add --disable-cuda-graph",
        ),
        (
            prefill != "disabled",
            f"prefill CUDA graphs ({prefill}): only decode steps are metered in a graph; add "
            "--disable-prefill-cuda-graph, or --disable-cuda-graph for none at all",
        ),
        (
            decode != "full",
            f"decode CUDA graphs ({decode}): metered are those of --cuda-graph-backend-decode full; use that, or add "
            "--disable-cuda-graph",
        ),
        (
            policy.repairs,
            f"CUDA graphs with gate.kind: {policy.gate.kind}: Python restores blocks between two kernels, which a "
            "replay does not run; add --disable-cuda-graph",
        ),
        (
            policy.meter.audit_every > 0 or policy.meter.audit_share > 0,
            f"CUDA graphs with meter.{'audit_every' if policy.meter.audit_every else 'audit_share'}: an audit needs "
            "the queries, which stay in the graph; set it to 0, or add --disable-cuda-graph",
        ),
        (
            policy.meter.sketch_share > 0,
            "CUDA graphs with meter.sketch_share: bounds from sketches need the queries, which stay in the graph; set "
            "it to 0, or add --disable-cuda-graph",
        ),
    ):
        if odd:
            raise UnsupportedError(what)


def check_engine_cache(prefill_reads: str, args: Any) -> None:
    """Raise UnsupportedError where the engine's own cache cannot be metered as its attention reads it."""
    backend = args.prefill_attention_backend or args.attention_backend
    if args.device != "cpu":
        check_gpu_cache(args)
    needed = {"torch_native": "stored", "triton": "chunk_exact", "flashinfer": "chunk_exact"}[backend]
    if prefill_reads != needed:
        raise UnsupportedError(
            f"quantizer.name: engine with attention backend {backend}, whose prompt chunks read "
            f"{'what they stored' if needed == 'stored' else 'their own exact keys'}: set prefill_reads to {needed!r}"
        )


def check_gpu_cache(args: Any) -> None:
    """Raise UnsupportedError but for the one backend whose weights stay in 16 bit over an fp8 cache."""
    others = sorted(set(chosen_backends(args)) - {"flashinfer"})
    if others:
        raise UnsupportedError(
            f"quantizer.name: engine on device {args.device!r} with attention backend {', '.join(others)}: its kernels "
            "round attention weights to the cache's dtype, which no radius covers; use --attention-backend flashinfer, "
            "or name the cast in the policy (quantizer.name: fp8_e4m3_cast) and use --kv-cache-dtype auto"
        )
    if args.kv_cache_dtype not in ("fp8_e4m3", "fp8_e5m2"):
        raise UnsupportedError(
            f"quantizer.name: engine on device {args.device!r} with --kv-cache-dtype {args.kv_cache_dtype}: what its "
            "kernels read is not known; use fp8_e4m3 or fp8_e5m2"
        )


def check_flashinfer_cache(backend: Any, scales: Mapping[int, tuple[float, float]]) -> None:
    """Raise UnsupportedError where FlashInfer's chunks read what they stored, or an fp8 cache has scales.

    backend: SGLang's `FlashInferAttnBackend`. scales: those of the layers that have any.
    """
    for odd, what in (
        (backend.use_paged, "SGLANG_FLASHINFER_USE_PAGED: chunks read what they stored; unset it"),
        (backend.enable_deterministic, "deterministic inference: chunks read what they stored; leave it out"),
        (backend.is_multimodal, "a multimodal model: chunks read what they stored; use another model"),
        (
            any(pair != (1.0, 1.0) for pair in scales.values()),
            "an fp8 cache with scales: its witnesses are not in the units of the codes; leave --kv-cache-dtype's "
            "scales out (they are 1 then), or use --kv-cache-dtype auto",
        ),
    ):
        if odd:
            raise UnsupportedError(f"quantizer.name: engine with attention backend flashinfer and {what}")


def check_engine_pool(pool: Any, model_dtype: torch.dtype) -> None:
    """Raise UnsupportedError for a pool of the engine's own that cannot be read back, or that quantizes nothing."""
    check_pool_kind(pool)
    if pool.dtype == model_dtype:
        raise UnsupportedError(
            f"quantizer.name: engine, but the pool keeps the model's own {str(model_dtype).removeprefix('torch.')}, so "
            "nothing is quantized; start the server with the --kv-cache-dtype to be metered"
        )
    if pool.is_quantized_kv_cache and not pool.quant_method.needs_plain_kv_dequant_read():
        raise UnsupportedError(
            f"quantizer.name: engine: a {pool.quant_method.name} pool is read by kernels only, so what they read is "
            "not known; name a quantizer in the policy and use --kv-cache-dtype auto"
        )


def check_gate(kind_repairs: bool, on_exhausted: str, args: Any) -> None:
    """Raise UnsupportedError for an abort that only one rank would know of."""
    if kind_repairs and on_exhausted == "abort" and args.tp_size > 1:
        raise UnsupportedError(
            f"gate.on_exhausted: abort with --tp-size {args.tp_size}: the ranks' schedulers would part ways; use serve"
        )


def check_storage(storage: str, args: Any) -> None:
    """Raise UnsupportedError for a packed cache beside a cache dtype of the engine's own, or under other kernels."""
    for backend in chosen_backends(args):
        if storage == "packed" and backend not in CPU_BACKENDS:
            raise UnsupportedError(
                f"attention backend {backend!r} with quantizer.storage: packed: it plans its kernels for a pool of "
                "16-bit numbers; use --attention-backend triton"
            )
    if storage == "packed" and args.kv_cache_dtype != "auto":
        raise UnsupportedError(
            f"--kv-cache-dtype {args.kv_cache_dtype} with quantizer.storage: packed: the pool holds codes; use auto"
        )


def check_bypass(quantizer: Quantizer, config: Any) -> None:
    """Raise UnsupportedError for outliers in 16 bit under a model that has more, or more pairs than there are."""
    name, pairs = quantizer.name, quantizer.bypass_pairs
    if pairs and config.dtype == torch.float32:
        raise UnsupportedError(
            f"quantizer.name: {name} keeps outlier channels in 16 bit, but the model is float32; use --dtype bfloat16"
        )
    if pairs > config.head_dim // 2:
        raise UnsupportedError(
            f"quantizer.params: {name} bypasses {pairs} channel pairs; a head of {config.head_dim} channels has "
            f"{config.head_dim // 2}"
        )


def check_port(host: str, port: int) -> None:
    """Raise UnsupportedError when `port` is taken, before a model is loaded for nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UnsupportedError(f"--port {port} on {host}: {error.strerror}; choose another --port") from error


def model_checks(
    config: Any, policy: Policy, quantizer: Quantizer, backend: str, kv_cache_dtype: str, device: str
) -> list[tuple[str, Callable[[], Any]]]:
    """What a model is checked for, in order and by subject: the server's verdict at its start, and the doctor's.

    config: SGLang's `ModelConfig`. backend, kv_cache_dtype, device: as the server was given them.
    """
    layers = range(config.num_attention_layers)
    return [
        ("model", lambda: check_model(config, backend, kv_cache_dtype, device)),
        ("architecture", lambda: check_architecture(config)),
        ("outliers", lambda: check_bypass(quantizer, config)),
        ("head size", lambda: check_quantizer(quantizer, config.head_dim)),
        ("quantizer.layers", lambda: policy.quantizer.layers_of(layers)),
        ("meter.layers", lambda: policy.meter.layers_of(layers)),
    ]


def check_served_model(
    config: Any, policy: Policy, quantizer: Quantizer, backend: str, kv_cache_dtype: str, device: str
) -> None:
    """All of `model_checks`: raises the error of the first that refuses."""
    for _subject, check in model_checks(config, policy, quantizer, backend, kv_cache_dtype, device):
        check()


def architecture(config: Any) -> str:
    """What messages call the model."""
    names = getattr(config.hf_config, "architectures", None) or ["this model"]
    return str(names[0])


def check_architecture(config: Any) -> None:
    """Raise UnsupportedError for a model of which SGLang has no class, nor Transformers one that it runs."""
    from sglang.srt.model_loader.utils import get_model_architecture

    try:
        get_model_architecture(config)
    except ValueError as error:
        said = " ".join(str(error).split()).partition(" Supported architectures:")[0]
        raise UnsupportedError(f"{architecture(config)} cannot be served by this SGLang: {said}") from error


def check_kind(config: Any) -> None:
    """Raise UnsupportedError for a model whose layers are of kinds that are not metered, whatever the options."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    name = architecture(config)
    if config.attention_arch.name == "SSM":
        raise UnsupportedError(f"{name} {WHY['state-space']}")
    if (recurrent := mambaish_config(config)) is not None:
        attending, layers = getattr(recurrent, "full_attention_layer_ids", None), config.num_attention_layers
        others = 0 if attending is None else layers - len(attending)
        why = f"{WHY['none']} ({others} of {layers})" if others else WHY["state"]
        raise UnsupportedError(f"{name} {why}; metered are models of attention layers only")
    attention = describe(config.hf_config, name, config.hf_text_config)
    attention.refuse("none", "state", "shared", "chunked", "shapes", "diffusion", "bidirectional", "alibi")
    if config.attention_arch.name != "MHA":
        raise UnsupportedError(f"{name} {WHY['mla']}")


def check_model(config: Any, backend: str, kv_cache_dtype: str = "auto", device: str = "cpu") -> None:
    """Raise UnsupportedError for an architecture or head size the meter has no radii for."""
    check_kind(config)
    name = architecture(config)
    if config.is_hybrid_swa:
        raise UnsupportedError(
            f"{name} keeps layers with a window in a pool of their own (SWAKVPool), whose rows are not one token each; "
            "use --disable-hybrid-swa-memory, under which every layer keeps every token"
        )
    if device != "cpu" and config.dtype == torch.float32:
        raise UnsupportedError(
            f"{name} in float32 on {device!r}: the engine multiplies in TF32 there, whose rounding no radius covers; "
            "use --dtype bfloat16 or float16"
        )
    if kv_cache_dtype in ("bf16", "bfloat16") and config.dtype != torch.bfloat16:
        raise UnsupportedError(
            f"--kv-cache-dtype {kv_cache_dtype} under a {str(config.dtype).removeprefix('torch.')} model: it would "
            "round before the quantizer does; use --kv-cache-dtype auto or --dtype bfloat16"
        )
    if config.head_dim not in HEAD_DIMS:
        raise UnsupportedError(
            f"{name} has head_dim {config.head_dim}; metered are multiples of 16 from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"
        )
    if getattr(config, "v_head_dim", config.head_dim) != config.head_dim:
        raise UnsupportedError(
            f"{name} has keys of {config.head_dim} and values of {config.v_head_dim} channels; metered are equal widths"
        )
    if not getattr(config, "is_generation", True):
        raise UnsupportedError(f"{name} does not generate text; metered are generating models")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{name} is an encoder-decoder model; metered are decoder-only models")
    soft_cap = getattr(config.hf_text_config, "attn_logit_softcapping", None)
    if soft_cap and backend == "torch_native":
        raise UnsupportedError(
            f"{name} caps its logits (attn_logit_softcapping {soft_cap}), which SGLang's torch_native backend ignores; "
            "use --attention-backend triton"
        )


def check_layers(model: Any, num_layers: int) -> list[Any]:
    """The attention layers; UnsupportedError for some that do more than causal softmax over their own keys."""
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    layers = [module for module in model.modules() if isinstance(module, RadixAttention)]
    ids = sorted(layer.layer_id for layer in layers)
    if ids != sorted(set(ids)) or len(ids) != num_layers:
        raise UnsupportedError(
            f"the model has attention layers {ids} over a pool of {num_layers} layers; metered are models in which "
            "every layer of the pool belongs to one attention layer"
        )
    for layer in layers:
        for odd, what in (
            (layer.is_cross_attention, "cross-attention"),
            (layer.attn_type != AttentionType.DECODER, f"{layer.attn_type.value} attention"),
            (layer.use_irope, "chunked local attention (iRoPE)"),
            ((layer.xai_temperature_len or 0) > 0, "a temperature that depends on position"),
            (layer.pos_encoding_mode != "NONE", f"position encoding {layer.pos_encoding_mode} in the logits"),
        ):
            if odd:
                raise UnsupportedError(f"attention layer {layer.layer_id} uses {what}, which the meter does not follow")
    return layers


def check_pool_kind(pool: Any) -> None:
    """Raise UnsupportedError for a pool whose rows are not one token each."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    if type(pool) is not MHATokenToKVPool:
        raise UnsupportedError(
            f"the server uses {type(pool).__name__}; metered is MHATokenToKVPool (full attention in every layer)"
        )
    if pool.kv_cache_layout != "nhd":
        raise UnsupportedError(f"the pool's layout is {pool.kv_cache_layout!r}; metered is 'nhd'")


def check_pool(pool: Any, packed: bool = False) -> None:
    """Raise UnsupportedError for a pool whose rows are not plain 16- or 32-bit keys and values, one row a token."""
    check_pool_kind(pool)
    allowed = (torch.int8,) if packed else (torch.float32, torch.float16, torch.bfloat16)
    if pool.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise UnsupportedError(f"the pool's dtype is {pool.dtype}; with this policy it must be {names}")
