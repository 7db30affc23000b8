"""The metered worker: vLLM's own worker class that builds the meter over its cache and names the requests of a pass."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
import vllm
from vllm.v1.worker.worker_base import WorkerBase

import witcert_core
from witcert_core import Policy
from witcert_core.errors import UnsupportedError, WitCertError
from witcert_core.serving import Buffers, Command, banner_text, capacity, in_one_line, refuse, rotary_tables
from witcert_vllm import process
from witcert_vllm.backend import described, is_stock, take_over
from witcert_vllm.drafts import check_own_layers, own_layers, without_law
from witcert_vllm.geometry import (
    AttentionGroup,
    attention_groups,
    block_size,
    layer_ids,
    num_hidden_layers,
    of_one_shape,
    read_geometry,
    rotary_modules,
    tensor_ranks,
    value_width,
)
from witcert_vllm.installation import current
from witcert_vllm.memory import bytes_per_block
from witcert_vllm.packed import coded_layer, layout_of, packed_layer
from witcert_vllm.pool import LatentPool, PagePool, check_layout, cpu_views, engine_pool, plain_views
from witcert_vllm.refusals.model import untried_device
from witcert_vllm.refusals.server import BACKENDS
from witcert_vllm.refusals.worker import RUNNER, attention_layers, check_specs, is_latent
from witcert_vllm.runtime import VllmRuntime

T = TypeVar("T")


def names_refusals(method: Callable[..., T]) -> Callable[..., T]:
    """A refusal in a worker process ends in tracebacks of vLLM's, in every process: first it is said in one line.

    So is any other error that comes from our code; one of vLLM's own is left to vLLM.
    """

    @functools.wraps(method)
    def wrapper(worker: Any, *args: Any, **kwargs: Any) -> T:
        try:
            return method(worker, *args, **kwargs)
        except Exception as error:
            if worker.rank == 0 and (isinstance(error, WitCertError) or raised_by_us(error)):
                print(f"witcert: {in_one_line(error)}", file=sys.stderr, flush=True)
            raise

    return wrapper


def raised_by_us(error: BaseException) -> bool:
    """Whether the error came out of this project's code, or of a library that it called, and not out of vLLM's."""
    theirs = Path(vllm.__file__).parent
    ours = (Path(witcert_core.__file__).parent, Path(__file__).parent)
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    of_both = [file for file in frames if any(root in file.parents for root in (theirs, *ours))]
    return bool(of_both) and theirs not in of_both[-1].parents


class MeteredWorker(WorkerBase):
    """What is added to a worker class; `cpu_worker.py` and `gpu_worker.py` combine it with vLLM's."""

    @names_refusals
    def init_device(self) -> None:
        process.set_runtime(None)
        take_over(BACKENDS)
        super().init_device()
        name_requests(self.model_runner)

    @names_refusals
    def determine_available_memory(self) -> int:
        """vLLM's figure less the share that witnesses and pass ids will take."""
        available: int = super().determine_available_memory()
        specs = self.model_runner.get_kv_cache_spec()
        check_specs({name: specs[name] for name in own_layers(specs, self.vllm_config)})
        block, beside = bytes_per_block(current(), self.vllm_config, specs)
        return int(available * block / (block + beside))

    @names_refusals
    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        groups = attention_groups(kv_cache_config, self.vllm_config).values()
        runtime = build_runtime(current(), self.vllm_config, self.model_runner.get_model(), groups)
        runtime.facts_of = functools.partial(facts_of, self.model_runner)
        process.set_runtime(runtime)
        if runtime.ranks.reports:
            print(
                banner_text(
                    runtime,
                    answers="kv_transfer_params.witcert",
                    metrics="/metrics",
                    note=untried_device(runtime.geometry.device),
                ),
                file=sys.stderr,
                flush=True,
            )

    def witcert_status(self) -> dict[str, Any]:
        """Called through `collective_rpc` for `/witcert/status`."""
        return process.runtime().status()

    def witcert_command(self, command: Command) -> None:
        """Called through `collective_rpc` for `/witcert/probes`: every worker gets it between the same two passes."""
        process.runtime().command(command)


def name_requests(runner: Any) -> None:
    """Let a model runner announce the requests of every real pass, in batch order, before it builds the metadata."""
    refuse([RUNNER], runner)
    if hasattr(runner, "_prepare_inputs"):  # model runner V1

        def announce(_out: Any, scheduled: Any, *_args: Any, **_kw: Any) -> None:
            ids, drafts = runner.input_batch.req_ids, scheduled.scheduled_spec_decode_tokens
            process.announce(ids, [len(drafts.get(request_id, ())) for request_id in ids])

        wrap_method(runner, "_prepare_inputs", announce)
    else:  # model runner V2

        def announce_batch(_out: Any, batch: Any) -> None:
            drafts = batch.num_draft_tokens_per_req
            process.announce(batch.req_ids, [0] * len(batch.req_ids) if drafts is None else drafts.tolist())

        wrap_method(runner, "prepare_attn", announce_batch)


def facts_of(runner: Any, request_id: str) -> dict[str, str | int]:
    """What a model runner knows of a request of its batch, for probes: `http.FACTS`."""
    if hasattr(runner, "_prepare_inputs"):  # model runner V1
        request = runner.requests[request_id]
        prompt, adapter = request.num_prompt_tokens, request.lora_request
    else:  # model runner V2
        prompt = runner.req_states.prompt_len.np[runner.req_states.req_id_to_index[request_id]]
        adapter = runner.lora_state.lora_requests.get(request_id)
    return {"prompt": int(prompt), "lora": "" if adapter is None else adapter.lora_name}


def wrap_method(owner: Any, name: str, after: Callable[..., None]) -> None:
    """Call `after(result, *args)` after each call of one object's method."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        after(result, *args, **kwargs)
        return result

    setattr(owner, name, wrapper)


def build_runtime(policy: Policy, vllm_config: Any, model: Any, groups: Iterable[AttentionGroup]) -> VllmRuntime:
    """The meter over the cache that was just allocated; raises UnsupportedError for layers it does not follow."""
    layers = attention_layers(vllm_config)
    if vllm_config.speculative_config is not None:
        check_own_layers(layers, model)
    latent = is_latent(next(iter(layers.values())))
    ids = layer_ids(list(layers))
    ranks = tensor_ranks()
    tables = list(groups)
    grouped = [
        (number, alike)
        for number, of in enumerate(tables)
        for alike in of_one_shape({name: layers[name] for name in of.layers})
    ]
    geometry, *others = (
        read_geometry(vllm_config, alike, tables[number].window, ranks.rank, ranks.size) for number, alike in grouped
    )
    quantizer, rotary = policy.resolved_quantizer, None
    pool: PagePool | LatentPool | Buffers
    if policy.stores_parts:
        k_bytes, _ = capacity.coded_bytes(quantizer, geometry.head_dim, geometry.v_head_dim)
        pool = {ids[name]: coded_layer(layer.kv_cache, k_bytes) for name, layer in layers.items()}
    elif policy.quantizer.storage == "packed":
        layout, dtype = layout_of(quantizer, geometry.head_dim, latent), geometry.pool_dtype
        caches = {name: layer.kv_cache[:, None] if latent else layer.kv_cache for name, layer in layers.items()}
        pool = {
            ids[name]: packed_layer(cache, layout, dtype, geometry.rotary.latent_dim) for name, cache in caches.items()
        }
    else:
        own = policy.meters_engine
        if latent:
            pool = LatentPool({ids[name]: layer.kv_cache for name, layer in layers.items()}, geometry.v_head_dim)
        else:
            pool = engine_pool(layers, ids) if own else page_pool(layers, ids)
        # A quantized cache gives the pattern back to within half a step of its coarsest code.
        check_layouts(pool, layers, ids, geometry.pool_dtype, tolerance=1 / 64 if own else 0.0)
    if quantizer.space == "pre_rope":
        quantized = set(policy.quantizer.layers_of(sorted(ids.values())))
        wanted = {name: layer for name, layer in ids.items() if layer in quantized}
        dtype = vllm_config.model_config.dtype
        head_dims = {ids[name]: layer.head_size for name, layer in layers.items()}
        rotary = rotary_tables(rotary_modules(model, wanted), head_dims, dtype, geometry.device)
    runtime = VllmRuntime(
        "vllm",
        policy,
        geometry,
        pool,
        None,
        ranks,
        rotary,
        others=others,
        num_hidden_layers=num_hidden_layers(vllm_config),
        keeps_ledger=False,
        without_law=without_law(vllm_config),
    )
    runtime.layer_ids = ids
    runtime.tables = [number for number, _ in grouped]
    runtime.block_sizes = [block_size(layers[of.layers[0]]) for of in tables]
    if latent:
        for name, layer in layers.items():
            layer.impl.layer_id = ids[name]
    return runtime


def page_pool(layers: dict[str, Any], ids: dict[str, int]) -> PagePool:
    """The pool over the caches of all layers."""

    def views(layer: Any) -> Any:
        if hasattr(layer, "isa"):  # set by the builder of CPU_ATTN, and so by what is derived from it
            return cpu_views(layer.kv_cache, layer.head_size, layer.isa)
        return plain_views(layer.kv_cache, layer.head_size)

    return PagePool({ids[name]: views(layer) for name, layer in layers.items()})


def check_layouts(
    pool: PagePool | LatentPool, layers: dict[str, Any], ids: dict[str, int], dtype: torch.dtype, tolerance: float
) -> None:
    """`check_layout` for every layer whose backend writes the cache apart from its forward pass."""
    for name, layer in layers.items():
        backend = layer.attn_backend
        if backend.forward_includes_kv_cache_update:
            if is_stock(backend.get_name()):
                continue
            raise UnsupportedError(
                f"attention backend {described(backend.get_name())} writes its cache inside forward, so its "
                "layout cannot be checked at start; write it in do_kv_cache_update, or unset WITCERT_POLICY"
            )

        def update(k: Any, v: Any, slots: Any, layer: Any = layer) -> None:
            if isinstance(pool, LatentPool):
                rest = layer.kv_cache, slots, layer.kv_cache_dtype, layer._k_scale
                layer.impl.do_kv_cache_update(v[:, 0], k[..., pool.latent_dim :], *rest)
            else:
                layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, slots)

        shapes = (layer.num_kv_heads, layer.head_size), (layer.num_kv_heads, value_width(layer))
        check_layout(pool, ids[name], layer.kv_cache, update, *shapes, dtype, tolerance, described(backend.get_name()))
