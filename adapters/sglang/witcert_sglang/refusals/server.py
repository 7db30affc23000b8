"""What a server is refused for before anything is started: its options, as SGLang resolved them, under the policy."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from witcert_core import Policy
from witcert_core.serving import ADAPTIVE_DRAFTS, UNSET, Option, Refusal, interpreting, refuse, split_groups

BACKENDS = ("torch_native", "triton", "flashinfer", "fa3")
CPU_BACKENDS = BACKENDS[:2]
SHARING_FLAGS = "--page-size {} or --disable-radix-cache"

_NOT_PLANNED = "its rows are not planned"
_MOVES = "it moves keys without their witnesses"
_OTHER_PROCESSES = "layers, tokens or requests of other processes would be missing from the report"
_NO_ROOM = "its answers have no room for a summary"
OPTIONS = (
    Option("pp_size", 1, "pipeline parallelism", _OTHER_PROCESSES),
    Option("dp_size", 1, "data parallelism", _OTHER_PROCESSES),
    Option("attn_dp_size", 1, "data-parallel attention", _OTHER_PROCESSES),
    Option("dcp_size", 1, "decode context parallelism", _OTHER_PROCESSES),
    Option("attn_cp_size", 1, "context parallelism", _OTHER_PROCESSES),
    Option("nnodes", 1, "several nodes", "the start-up checks know the processes of one"),
    Option("tokenizer_worker_num", 1, "tokenizer processes", "each would know a part of the requests only"),
    Option("enable_two_batch_overlap", False, "two-batch overlap", _NOT_PLANNED),
    Option("dllm_algorithm", None, "diffusion language models", "rows are not causal"),
    Option("enable_hierarchical_cache", False, "HiCache", _MOVES),
    Option("enable_unified_cache_external_linker", False, "an external KV store", _MOVES),
    Option("enable_flexkv", False, "FlexKV", _MOVES),
    Option("enable_lmcache", False, "LMCache", _MOVES),
    Option("disaggregation_mode", "null", "prefill/decode disaggregation", _MOVES),
    Option("radix_cache_backend", None, "a prefix cache of another make", "which slots requests share is not known"),
    Option("enable_hisparse", False, "sparse attention over a host cache", "the tokens read are not known"),
    Option("enable_unified_memory", False, "the unified memory pool", "its slots are not one token each"),
    Option("enable_torch_compile", False, "torch.compile", "the meter's Python does not run in compiled passes"),
    Option("enable_pdmux", False, "PD multiplexing", "prefill and decode passes run at once; the meter follows one"),
    Option("enable_mis", False, "multi-item scoring", "items do not see each other, which the meter does not follow"),
    Option("smg_grpc_mode", False, "a gRPC server of another package", _NO_ROOM),
    Option("grpc_mode", False, "a gRPC server of another package", _NO_ROOM),
    Option("is_embedding", False, "embedding models", "their passes sample nothing, so nothing would be reported"),
)


@dataclass(frozen=True)
class Server:
    """What a server was started with: its options as SGLang resolved them (`ServerArgs`), under a policy."""

    args: Any
    policy: Policy

    @property
    def on_cpu(self) -> bool:
        return bool(self.args.device == "cpu")

    @property
    def packed(self) -> bool:
        return self.policy.quantizer.storage == "packed"

    @property
    def backends(self) -> list[str]:
        """Attention backends it was given, of prompts and of decode steps; none where SGLang still chooses."""
        options = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
        return [backend for backend in (getattr(self.args, option) for option in options) if backend is not None]

    @property
    def prefill_backend(self) -> str:
        return str(self.args.prefill_attention_backend or self.args.attention_backend)

    @property
    def graphs(self) -> tuple[str, str] | None:
        """How decode steps and prompts are captured as CUDA graphs; None where neither is.

        On a CPU graphs are torch.compile's, which is refused by its own name.
        """
        if self.on_cpu:
            return None
        found = tuple(str(getattr(self.args.cuda_graph_config, phase).backend) for phase in ("decode", "prefill"))
        decode, prefill = found
        return None if decode == prefill == "disabled" else (decode, prefill)

    def other_backends(self, allowed: tuple[str, ...]) -> str:
        """The first that is not among those allowed, as messages name it."""
        others = [backend for backend in self.backends if backend not in allowed]
        return f"attention backend {others[0]!r}" if others else ""


def _options(server: Server) -> Any:
    return server.args


def _past_python(_server: Server) -> str | bool:
    from sglang.srt.environ import envs

    return envs.SGLANG_RUST_SERVER.get() and "SGLANG_RUST_SERVER"


def _quantizes_behind(server: Server) -> str | bool:
    dtype = server.args.kv_cache_dtype
    return (
        not server.policy.meters_engine
        and dtype not in ("auto", "bf16", "bfloat16")
        and f"--kv-cache-dtype {dtype} under quantizer.name: {server.policy.quantizer.name}"
    )


def _splits_groups(server: Server) -> str | bool:
    shares = not server.args.disable_radix_cache
    return shares and split_groups(server.policy.resolved_quantizer, server.args.page_size or 1)


CHAINS = ("EAGLE", "EAGLE3", "STANDALONE")
"""Algorithms of speculative decoding whose drafts are a chain where each has one successor."""


def without_law(args: Any) -> str:
    """Why the drafts of a server leave no request the probabilistic tier; '' where they leave it.

    Those of a model with an exact cache of its own follow from the text so far, and are right exactly where the text
    says so. EAGLE's and MTP's follow from hidden states over what the cache gave back, dither and all.
    """
    return "" if args.speculative_algorithm in (None, "STANDALONE") else ADAPTIVE_DRAFTS


def _drafts(server: Server, odd: bool) -> str | bool:
    algorithm = server.args.speculative_algorithm
    return algorithm is not None and odd and f"--speculative-algorithm {algorithm}"


DRAFT_ROWS: tuple[Refusal[Server], ...] = (
    Refusal(
        f"`--speculative-algorithm` other than {', '.join(CHAINS)}",
        "its rows see trees of drafts, or caches of its own, which is not followed",
        "use one of these, or leave it out",
        lambda server: _drafts(server, server.args.speculative_algorithm not in CHAINS),
    ),
    Refusal(
        "`--speculative-eagle-topk` above 1 (trees of drafts)",
        "a row sees its ancestors among the drafts only, which is not followed",
        "use `--speculative-eagle-topk 1`",
        lambda server: (
            _drafts(server, server.args.speculative_eagle_topk not in (None, 1))
            and f"--speculative-eagle-topk {server.args.speculative_eagle_topk}"
        ),
    ),
    Refusal(
        "speculative decoding with `quantizer.storage: packed`",
        "the pool of the draft model would hold codes as well",
        "set `quantizer.storage` to 'simulated', or leave `--speculative-algorithm` out",
        lambda server: _drafts(server, server.packed),
    ),
    Refusal(
        "speculative decoding with `quantizer.name: engine`",
        "which drafts of a pass its kernels read as stored is not known",
        "name the cast in the policy (`quantizer.name: fp8_e4m3_cast`) and use `--kv-cache-dtype auto`",
        lambda server: _drafts(server, server.policy.meters_engine),
    ),
    Refusal(
        "speculative decoding with `gate.on_exhausted: abort`",
        "it would end requests for rows of drafts that are not served",
        "use `gate.on_exhausted: serve`",
        lambda server: _drafts(server, server.policy.repairs and server.policy.gate.on_exhausted == "abort"),
    ),
)
SERVER_ROWS: tuple[Refusal[Server], ...] = (
    *(option.row(_options) for option in OPTIONS),
    *DRAFT_ROWS,
    Refusal(
        "`SGLANG_RUST_SERVER`",
        "clients are served past the Python server, which puts summaries on answers and keeps them",
        "unset it",
        _past_python,
    ),
    Refusal(
        "`--kv-cache-dtype` fp8, mxfp8, nvfp4 or fp4 without `quantizer.name: engine`",
        "it quantizes behind the policy's quantizer",
        "set `quantizer.name` to `engine` to meter that cache, or use `--kv-cache-dtype auto`",
        _quantizes_behind,
    ),
    Refusal(
        f"attention backends other than {', '.join(f'`{name}`' for name in BACKENDS)} (on a GPU)",
        "it is not wrapped (`trtllm_mha` is closed code)",
        f"use `--attention-backend {' or '.join(BACKENDS)}`",
        lambda server: not server.on_cpu and server.other_backends(BACKENDS),
    ),
    Refusal(
        f"attention backends other than {' and '.join(f'`{name}`' for name in CPU_BACKENDS)} on a CPU",
        "it is not metered there",
        f"use `--attention-backend {' or '.join(CPU_BACKENDS)}`",
        lambda server: server.on_cpu and server.other_backends(CPU_BACKENDS),
    ),
    Refusal(
        "`--attention-backend triton` on a CPU without `TRITON_INTERPRET=1`",
        "its kernels need a GPU, so the first request would fail",
        "use `--attention-backend torch_native` (or, slowly, `TRITON_INTERPRET=1` in the server's environment)",
        lambda server: (
            server.on_cpu
            and "triton" in server.backends
            and not interpreting()
            and "attention backend 'triton' on a CPU"
        ),
    ),
    Refusal(
        "`gate.on_exhausted: abort` with `--tp-size` above 1",
        "the ranks' schedulers would part ways",
        "use `gate.on_exhausted: serve`",
        lambda server: (
            server.policy.repairs
            and server.policy.gate.on_exhausted == "abort"
            and server.args.tp_size > 1
            and f"gate.on_exhausted: abort with --tp-size {server.args.tp_size}"
        ),
    ),
    Refusal(
        "`quantizer.storage: packed` with `flashinfer` or `fa3`",
        "it plans its kernels for a pool of 16-bit numbers",
        "use `--attention-backend triton`",
        lambda server: (
            server.packed
            and (other := server.other_backends(CPU_BACKENDS))
            and f"{other} with quantizer.storage: packed"
        ),
    ),
    Refusal(
        "`quantizer.storage: packed` with another `--kv-cache-dtype` than auto",
        "the pool holds codes",
        "use `--kv-cache-dtype auto`",
        lambda server: (
            server.packed
            and server.args.kv_cache_dtype != "auto"
            and f"--kv-cache-dtype {server.args.kv_cache_dtype} with quantizer.storage: packed"
        ),
    ),
    Refusal(
        "a quantizer that takes several tokens together, with a prefix cache and pages that are no multiple of these",
        "two requests could part inside a group",
        "use a `--page-size` that is a multiple of that (64 is one for all plugins here) or `--disable-radix-cache`",
        _splits_groups,
    ),
)


def _captured(server: Server) -> str:
    return "CUDA graphs" if server.graphs else ""


def _captured_elsewhere(server: Server) -> str | bool:
    backends = server.args.attention_backend, server.args.decode_attention_backend or server.args.attention_backend
    by_kernels = server.packed and not server.policy.stores_parts
    return (not by_kernels or backends != ("triton", "triton")) and _captured(server)


def _audited(server: Server) -> str | bool:
    meter = server.policy.meter
    key = "audit_every" if meter.audit_every > 0 else "audit_share" if meter.audit_share > 0 else ""
    return bool(key and server.graphs) and f"CUDA graphs with meter.{key}"


GRAPH_ROWS: tuple[Refusal[Server], ...] = (
    Refusal(
        "CUDA graphs without `quantizer.storage: packed` of `int8_dither` and `--attention-backend triton`",
        "replayed passes run no Python, so nothing would be measured but `int8_dither` and its variants with "
        "`quantizer.storage: packed` and `--attention-backend triton`",
        "add `--disable-cuda-graph`",
        _captured_elsewhere,
    ),
    Refusal(
        "CUDA graphs of prompts",
        "only decode steps are metered in a graph",
        "add `--disable-prefill-cuda-graph`, or `--disable-cuda-graph` for none at all",
        lambda server: server.graphs and server.graphs[1] != "disabled" and f"prefill CUDA graphs ({server.graphs[1]})",
    ),
    Refusal(
        "CUDA graphs of decode steps other than full ones",
        "metered are those of `--cuda-graph-backend-decode full`",
        "use that, or add `--disable-cuda-graph`",
        lambda server: server.graphs and server.graphs[0] != "full" and f"decode CUDA graphs ({server.graphs[0]})",
    ),
    Refusal(
        "CUDA graphs under a gate that repairs",
        "Python restores blocks between two kernels, which a replay does not run",
        "add `--disable-cuda-graph`",
        lambda server: (
            server.policy.repairs and server.graphs and f"CUDA graphs with gate.kind: {server.policy.gate.kind}"
        ),
    ),
    Refusal(
        "CUDA graphs with `meter.audit_every` or `meter.audit_share`",
        "an audit needs the queries, which stay in the graph",
        "set it to 0, or add `--disable-cuda-graph`",
        _audited,
    ),
    Refusal(
        "CUDA graphs with `meter.sketch_share`",
        "bounds from sketches need the queries, which stay in the graph",
        "set it to 0, or add `--disable-cuda-graph`",
        lambda server: server.policy.meter.sketch_share > 0 and server.graphs and "CUDA graphs with meter.sketch_share",
    ),
)


def _engine_elsewhere(server: Server) -> str | bool:
    others = sorted(set(server.backends) - {"flashinfer"})
    where = f"quantizer.name: engine on device {server.args.device!r} with attention backend {', '.join(others)}"
    return not server.on_cpu and bool(others) and where


def _reads(server: Server, backends: tuple[str, ...], needed: str) -> str | bool:
    """A policy whose prompts read something else than those backends' do."""
    backend, reads = server.prefill_backend, server.policy.prefill_reads
    return (
        backend in backends
        and reads != needed
        and f"quantizer.name: engine with attention backend {backend} under prefill_reads: {reads}"
    )


ENGINE_ROWS: tuple[Refusal[Server], ...] = (
    Refusal(
        "on a GPU with another backend than `flashinfer`",
        "its kernels round attention weights to the cache's dtype, which no radius covers",
        "use `--attention-backend flashinfer`, or name the cast in the policy (`quantizer.name: fp8_e4m3_cast`) and "
        "use `--kv-cache-dtype auto`",
        _engine_elsewhere,
    ),
    Refusal(
        "on a GPU with another cache than fp8_e4m3 and fp8_e5m2",
        "what its kernels read is not known",
        "use fp8_e4m3 or fp8_e5m2",
        lambda server: (
            not server.on_cpu
            and server.args.kv_cache_dtype not in ("fp8_e4m3", "fp8_e5m2")
            and f"quantizer.name: engine on device {server.args.device!r} with --kv-cache-dtype "
            f"{server.args.kv_cache_dtype}"
        ),
    ),
    Refusal(
        "under `prefill_reads: chunk_exact` with `torch_native`",
        "its prompt chunks read what they stored",
        "set `prefill_reads` to 'stored'",
        lambda server: _reads(server, ("torch_native",), "stored"),
    ),
    Refusal(
        "under `prefill_reads: stored` with `triton` or `flashinfer`",
        "its prompt chunks read their own exact keys",
        "set `prefill_reads` to 'chunk_exact'",
        lambda server: _reads(server, ("triton", "flashinfer"), "chunk_exact"),
    ),
)


NO_MODEL: Refusal[None] = Refusal(
    "a model directory that is not there", "no such directory", "name one with a config.json"
)
NO_PORT: Refusal[None] = Refusal(
    "a port that cannot be used", "a server could not listen there", "choose another `--port`"
)


def check_options(server: Server) -> None:
    """Raise UnsupportedError for options under which the meter would not see everything, or could not be sound."""
    refuse((*SERVER_ROWS, *GRAPH_ROWS, *(ENGINE_ROWS if server.policy.meters_engine else ())), server, UNSET)


def check_model_path(model_path: str) -> None:
    """Raise UnsupportedError for a local model path that is not there (a hub id is left to SGLang)."""
    looks_local = model_path.startswith(("/", "./", "../", "~")) or model_path.count("/") > 1
    if looks_local and not Path(model_path).expanduser().exists():
        raise NO_MODEL.error(f"--model-path {model_path}")


def check_port(host: str, port: int) -> None:
    """Raise UnsupportedError when `port` is taken, before a model is loaded for nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise NO_PORT.error(f"--port {port} on {host} ({error.strerror})") from error
