"""What a server is refused for before anything is started: its options, what vLLM made of them, and the policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from witcert_core import Policy
from witcert_core.serving import UNSET, Option, Refusal, refuse, split_groups
from witcert_vllm.pool import FLOAT8, PER_TOKEN_HEAD

BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "CPU_MLA", "TRITON_MLA", "CUSTOM")
READ_BACK = (*FLOAT8, *PER_TOKEN_HEAD)
"""Values of `--kv-cache-dtype` whose cache is metered under `quantizer.name: engine`."""
WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "witcert_vllm.cpu_worker.MeteredCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "witcert_vllm.gpu_worker.MeteredGPUWorker",
}
SHARING_FLAGS = "--block-size {} or --no-enable-prefix-caching"

_NOT_PLANNED = "its rows are not planned"
_OTHER_PROCESSES = "layers, tokens or requests of other processes would be missing from the report"
OPTIONS = (
    Option("pipeline_parallel_size", 1, "pipeline parallelism", _OTHER_PROCESSES),
    Option("data_parallel_size", 1, "data parallelism", _OTHER_PROCESSES),
    Option("decode_context_parallel_size", 1, "decode context parallelism", _OTHER_PROCESSES),
    Option("prefill_context_parallel_size", 1, "prefill context parallelism", _OTHER_PROCESSES),
    Option("_api_process_count", 1, "several API servers", _OTHER_PROCESSES, flag="--api-server-count"),
    Option("enable_dbo", False, "dual-batch overlap", _NOT_PLANNED),
    Option("kv_sharing_fast_prefill", False, "fast prefill over shared KV", _NOT_PLANNED),
    Option("kv_offloading_size", None, "KV offloading", "it moves keys without their witnesses"),
    Option("scheduler_cls", None, "a scheduler class of your own", "results are handed over by the metered one"),
    Option("worker_cls", "auto", "a worker class of your own", "the meter lives in the metered one"),
)

# The options, as vLLM's `EngineArgs` ------------------------------------------------------------------------------


def _past_python(_args: Any) -> str | bool:
    return os.environ.get("VLLM_USE_RUST_FRONTEND", "0") != "0" and "VLLM_USE_RUST_FRONTEND"


@dataclass(frozen=True)
class Beside:
    """Another KV connector of the user's (vLLM's `KVTransferConfig`), beside which the policy is to hold."""

    transfer: Any
    policy: Policy


CONNECTOR_ROWS: tuple[Refusal[Beside], ...] = (
    Refusal(
        "another KV connector (`--kv-transfer-config`) under `quantizer.storage: packed`",
        "it would carry packed pages without the dither vectors they were written with",
        "set `quantizer.storage` to 'simulated' or leave the connector out",
        lambda beside: (
            beside.policy.quantizer.storage == "packed"
            and f"--kv-transfer-config with {beside.transfer.kv_connector} under quantizer.storage: packed"
        ),
    ),
    Refusal(
        "another KV connector (`--kv-transfer-config`) under a gate that repairs",
        "blocks it loads have no exact copy to repair from",
        "set `gate.kind` to 'observe' or leave the connector out",
        lambda beside: (
            beside.policy.repairs
            and f"--kv-transfer-config with {beside.transfer.kv_connector} under gate.kind: {beside.policy.gate.kind}"
        ),
    ),
)
ARGS_ROWS: tuple[Refusal[Any], ...] = (
    Refusal(
        "`VLLM_USE_RUST_FRONTEND`",
        "clients are served past the Python server, which puts summaries on answers and keeps them",
        "unset it",
        _past_python,
    ),
    *(option.row(lambda args: args) for option in OPTIONS),
)
SERVER_ROWS: tuple[Refusal[Any], ...] = (*ARGS_ROWS, *CONNECTOR_ROWS)


def check_engine_args(args: Any) -> None:
    """Raise UnsupportedError for options of vLLM's `EngineArgs` under which the meter would not see everything."""
    refuse(ARGS_ROWS, args, UNSET)


def check_connector(transfer_config: Any, policy: Policy) -> None:
    """Raise UnsupportedError for a KV connector beside which tokens would be read whose error nobody knows."""
    if transfer_config is not None:
        refuse(CONNECTOR_ROWS, Beside(transfer_config, policy))


# What vLLM made of the options, as its `VllmConfig` ---------------------------------------------------------------


@dataclass(frozen=True)
class Resolved:
    """vLLM's `VllmConfig` under a policy; stock: the class that each backend's name stood for, see `backend.STOCK`."""

    config: Any
    policy: Policy
    stock: Mapping[str, str]

    @property
    def device(self) -> str:
        return str(self.config.device_config.device_type)

    @property
    def cache_dtype(self) -> str:
        return str(self.config.cache_config.cache_dtype)

    @property
    def model_dtype(self) -> str:
        """As options name it: "bfloat16"."""
        return str(self.config.model_config.dtype).removeprefix("torch.")

    @property
    def plain(self) -> bool:
        """Whether the cache keeps what the model hands over."""
        return self.cache_dtype in ("auto", self.model_dtype)


def _replicated(config: Any) -> str | bool:
    size = config.parallel_config.data_parallel_size
    return size != 1 and f"data_parallel_size became {size} without an option for it"


RESOLVED_ROWS: tuple[Refusal[Any], ...] = (
    Refusal(
        "data parallelism that the environment asks for (`VLLM_DP_SIZE`)",
        "data parallelism: requests of other replicas would be missing from the report",
        "serve it without that",
        _replicated,
    ),
)
_LATENT_WRITE = "vllm::unified_mla_kv_cache_update"


def _unseen_writes(found: Resolved) -> str | bool:
    """Writes of latents that no Python of ours would see in every pass."""
    compilation = found.config.compilation_config
    if found.device == "cpu" or found.config.model_config.enforce_eager:
        return False
    if compilation.pass_config.fuse_rope_kvcache_cat_mla:
        return "fuse_rope_kvcache_cat_mla"
    return _LATENT_WRITE not in (compilation.splitting_ops or ()) and f"graphs that hold {_LATENT_WRITE}"


def _drafts(found: Resolved, odd: Callable[[Any], bool]) -> str | bool:
    """Speculative decoding of which `odd` says something of vLLM's `SpeculativeConfig`."""
    drafts = found.config.speculative_config
    return drafts is not None and odd(drafts) and f"speculative decoding by {drafts.method!r}"


DRAFT_ROWS: tuple[Refusal[Resolved], ...] = (
    Refusal(
        "`extract_hidden_states` as a method of speculative decoding",
        "its layers keep no keys and values",
        "leave it out of `--speculative-config`",
        lambda found: _drafts(found, lambda drafts: drafts.method == "extract_hidden_states"),
    ),
    Refusal(
        "`enable_adaptive_verification` in `--speculative-config`",
        "how many drafts of a request a pass verifies is known on the device alone",
        "leave it out",
        lambda found: _drafts(found, lambda drafts: drafts.enable_adaptive_verification),
    ),
    Refusal(
        "drafts of a model, or of layers of their own, with `quantizer.storage: packed`",
        "their caches would be pages of codes, which vLLM's own attention cannot read",
        "use the method `ngram`, or set `quantizer.storage` to 'simulated'",
        lambda found: (
            found.policy.quantizer.storage == "packed"
            and _drafts(found, lambda drafts: drafts.method not in ("ngram", "ngram_gpu", "suffix", "medusa"))
        ),
    ),
    Refusal(
        "speculative decoding over packed latents (MLA)",
        "vLLM multiplies a prefix out of its own cache for them, which only the meter's attention reads",
        "set `quantizer.storage` to 'simulated'",
        lambda found: (
            found.policy.quantizer.storage == "packed"
            and _drafts(found, lambda _any: found.config.model_config.use_mla)
        ),
    ),
    Refusal(
        "`gate.on_exhausted: abort` with speculative decoding",
        "it would end requests for rows of drafts that are not served",
        "use `gate.on_exhausted: serve`",
        lambda found: (
            found.policy.repairs and found.policy.gate.on_exhausted == "abort" and _drafts(found, lambda _any: True)
        ),
    ),
)
CONFIG_ROWS: tuple[Refusal[Resolved], ...] = (
    *DRAFT_ROWS,
    Refusal(
        "`quantizer.storage: packed` with another `--kv-cache-dtype` than auto",
        "pages hold the codes of the policy's quantizer",
        "use `--kv-cache-dtype auto`, or set `quantizer.storage` to 'simulated'",
        lambda found: (
            found.policy.quantizer.storage == "packed"
            and found.cache_dtype != "auto"
            and f"quantizer.storage: packed with --kv-cache-dtype {found.cache_dtype}"
        ),
    ),
    Refusal(
        "`quantizer.storage: packed` under a model with layers that keep a recurrent state",
        "the states and the codes of a layer would lie in the same memory in two layouts",
        "set `quantizer.storage` to 'simulated'",
        lambda found: (
            found.policy.quantizer.storage == "packed"
            and found.config.model_config.is_hybrid
            and "quantizer.storage: packed under a model with layers that keep a recurrent state"
        ),
    ),
    Refusal(
        "workers other than vLLM's of CPUs and GPUs",
        "the meter lives in metered workers",
        "metered are vLLM's CPU and GPU workers",
        lambda found: (
            found.config.parallel_config.worker_cls not in WORKERS
            and f"worker class {found.config.parallel_config.worker_cls!r}"
        ),
    ),
    Refusal(
        "models that bring a scheduler of their own",
        "results are handed over by metered schedulers",
        "metered are vLLM's own schedulers",
        lambda found: (
            found.config.scheduler_config.scheduler_cls is not None
            and f"this model is scheduled by {found.config.scheduler_config.scheduler_cls!r}"
        ),
    ),
    Refusal(
        "writes of latents (MLA) that are fused with RoPE, or captured in graphs (`--compilation-config`)",
        "what is written would not come by",
        "use `--enforce-eager`, or leave `fuse_rope_kvcache_cat_mla`, `splitting_ops` and "
        "`use_inductor_graph_partition` as they are",
        lambda found: found.config.model_config.use_mla and _unseen_writes(found),
    ),
    Refusal(
        "`quantizer.storage: packed` of latents (MLA) with a quantizer that is not dithered",
        "a value is a part of its key there, and is not stored again",
        "name `int8_dither`, or set `quantizer.storage` to 'simulated'",
        lambda found: (
            found.config.model_config.use_mla
            and found.policy.stores_parts
            and f"packed latents (MLA) with quantizer.name: {found.policy.quantizer.name}"
        ),
    ),
    Refusal(
        "packed latents (MLA) with prefix caching or chunked prefill, which a CPU does not have there",
        "vLLM multiplies a prefix out of its own cache, which only the meter's attention reads",
        "use `--no-enable-prefix-caching` and `--no-enable-chunked-prefill`, or set `quantizer.storage` to 'simulated'",
        lambda found: (
            found.config.model_config.use_mla
            and found.policy.quantizer.storage == "packed"
            and (
                found.config.cache_config.enable_prefix_caching or found.config.scheduler_config.enable_chunked_prefill
            )
            and "packed latents with prefixes"
        ),
    ),
    Refusal(
        "a quantizer that takes several tokens together, with prefix caching and blocks that are no multiple of these",
        "two requests could part inside a group",
        "use a `--block-size` that is a multiple of that (64 is one for all plugins here) or "
        "`--no-enable-prefix-caching`",
        lambda found: (
            found.config.cache_config.enable_prefix_caching
            and split_groups(found.policy.resolved_quantizer, found.config.cache_config.block_size)
        ),
    ),
)


def _behind(found: Resolved, dtypes: bool) -> str | bool:
    """A cache that quantizes under another quantizer than `engine`; dtypes: whether it is one that could be metered."""
    other = not found.plain and found.cache_dtype not in ("float16", "bfloat16")
    return other and (found.cache_dtype in READ_BACK) == dtypes and f"--kv-cache-dtype {found.cache_dtype}"


CACHE_ROWS: tuple[Refusal[Resolved], ...] = (
    Refusal(
        "`--kv-cache-dtype` bfloat16 or float16 under a model of another dtype",
        "it would round before the quantizer does",
        "use `--kv-cache-dtype auto`",
        lambda found: (
            not found.plain
            and found.cache_dtype in ("float16", "bfloat16")
            and f"--kv-cache-dtype {found.cache_dtype} under a {found.model_dtype} model"
        ),
    ),
    Refusal(
        f"`--kv-cache-dtype` {', '.join(READ_BACK)}, without `quantizer.name: engine`",
        "it quantizes behind the policy's quantizer",
        "set `quantizer.name` to 'engine' to meter that cache, or use `--kv-cache-dtype auto`",
        lambda found: _behind(found, True),
    ),
    Refusal(
        "every other `--kv-cache-dtype` that quantizes",
        "it quantizes behind the policy's quantizer",
        "use `--kv-cache-dtype auto`",
        lambda found: _behind(found, False),
    ),
)


def _unread(found: Resolved, turboquant: bool) -> str | bool:
    """A cache that nobody reads back; turboquant: one of that backend's."""
    unread = found.cache_dtype not in READ_BACK and found.cache_dtype.startswith("turboquant") == turboquant
    return unread and f"--kv-cache-dtype {found.cache_dtype}"


def _of_triton(found: Resolved) -> str | bool:
    by_token = found.cache_dtype.endswith("_per_token_head")
    on_cpu = found.stock.get("CPU_ATTN", "").endswith(".CPUAttentionBackend")
    return by_token and on_cpu and f"--kv-cache-dtype {found.cache_dtype} with CPU_ATTN"


ENGINE_ROWS: tuple[Refusal[Resolved], ...] = (
    Refusal(
        "a cache in the model's dtype, bfloat16 or float16",
        "it quantizes nothing",
        "start the server with the `--kv-cache-dtype` to be metered",
        lambda found: (
            (found.plain or found.cache_dtype in ("float16", "bfloat16"))
            and f"quantizer.name: engine with --kv-cache-dtype {found.cache_dtype}"
        ),
    ),
    Refusal(
        "`--kv-cache-dtype` turboquant_k8v4, turboquant_4bit_nc, turboquant_k3v4_nc, turboquant_3bit_nc",
        "vLLM's TURBOQUANT backend, which alone reads it, needs a GPU, keeps the first and last two layers in 16 bit, "
        "and its chunks read some of their own keys exactly and some as stored; on a CPU vLLM takes the name and "
        "stores something else",
        f"use one of {', '.join(READ_BACK)}",
        lambda found: _unread(found, True),
    ),
    Refusal(
        f"another `--kv-cache-dtype` than {', '.join(READ_BACK)}",
        "what attention reads of it is not known",
        f"use one of {', '.join(READ_BACK)}",
        lambda found: _unread(found, False),
    ),
    Refusal(
        "on a GPU",
        "kernels there round attention weights to the cache's dtype, which no radius covers yet",
        "name the cast in the policy instead (`quantizer.name: fp8_e4m3_cast`) and start with `--kv-cache-dtype auto`",
        lambda found: found.device != "cpu" and f"quantizer.name: engine on device {found.device!r}",
    ),
    Refusal(
        f"`--kv-cache-dtype` {' or '.join(PER_TOKEN_HEAD)} with `CPU_ATTN`",
        "vLLM accepts it there and stores something else",
        "use `--kv-cache-dtype fp8`",
        _of_triton,
    ),
    Refusal(
        "under `prefill_reads: chunk_exact`",
        "vLLM's prompt chunks read what they stored",
        "set `prefill_reads` to 'stored'",
        lambda found: (
            found.policy.prefill_reads != "stored"
            and f"quantizer.name: engine under prefill_reads: {found.policy.prefill_reads}"
        ),
    ),
)


def check_resolved(config: Any) -> None:
    """Raise UnsupportedError for what no option asked for: VLLM_DP_SIZE makes replicas."""
    refuse(RESOLVED_ROWS, config, UNSET)


def check_config(found: Resolved) -> None:
    """Raise UnsupportedError for a resolved `VllmConfig` the meter does not follow."""
    refuse((*(ENGINE_ROWS if found.policy.meters_engine else CACHE_ROWS), *CONFIG_ROWS), found, UNSET)
