"""What only a scheduler sees: the pool and the layers of the model that was loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from witcert_core import Policy
from witcert_core.serving import Refusal, check_query_heads, refuse
from witcert_sglang.sub_pools import SubPool, is_latent, sub_pools


@dataclass(frozen=True)
class ServedPool:
    """SGLang's pool under a policy; dtype: the model's."""

    pool: Any
    policy: Policy
    dtype: torch.dtype

    @property
    def allowed(self) -> tuple[torch.dtype, ...]:
        """What a pool that the meter writes may be made of."""
        packed = self.policy.quantizer.storage == "packed"
        return (torch.int8,) if packed else (torch.float32, torch.float16, torch.bfloat16)


def _other_pool(served: ServedPool) -> str | bool:
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    pool, plain = served.pool, (MHATokenToKVPool, MLATokenToKVPool)
    known = type(pool) in (*plain, SWAKVPool, HybridLinearKVPool)
    odd = [pool] if not known else [sub.pool for sub in sub_pools(pool) if type(sub.pool) not in plain]
    return bool(odd) and f"the server uses {type(odd[0]).__name__}"


def _combined(served: ServedPool, engine: bool) -> str | bool:
    """A pool of pools under a policy that knows one pool; engine: one that meters SGLang's own cache."""
    policy, subs = served.policy, sub_pools(served.pool)
    asked = policy.meters_engine if engine else policy.quantizer.storage == "packed"
    said = "quantizer.name: engine" if engine else "quantizer.storage: packed"
    return asked and subs[0].pool is not served.pool and f"{said} in a {type(served.pool).__name__}"


def _kernels_alone(served: ServedPool) -> str | bool:
    pool = served.pool
    return (
        served.policy.meters_engine
        and pool.is_quantized_kv_cache
        and not pool.quant_method.needs_plain_kv_dequant_read()
        and f"quantizer.name: engine in a {pool.quant_method.name} pool"
    )


OUTER_POOL_ROWS: tuple[Refusal[ServedPool], ...] = (
    Refusal(
        "pools other than `MHATokenToKVPool` and `MLATokenToKVPool`, alone or within `SWAKVPool` or "
        "`HybridLinearKVPool`",
        "its slots are not one token each",
        "metered are these",
        _other_pool,
    ),
    Refusal(
        "`quantizer.name: engine` in a `SWAKVPool` or `HybridLinearKVPool`",
        "what SGLang's kernels read there was not tried",
        "name a quantizer in the policy and use `--kv-cache-dtype auto`",
        lambda served: _combined(served, engine=True),
    ),
    Refusal(
        "`quantizer.storage: packed` in a `SWAKVPool` or `HybridLinearKVPool`",
        "codes are laid out over one pool of all layers",
        "set `quantizer.storage` to 'simulated'",
        lambda served: _combined(served, engine=False),
    ),
)
POOL_ROWS: tuple[Refusal[ServedPool], ...] = (
    Refusal(
        "pools in another layout than NHD",
        "the meter reads a token's heads one after the other",
        "metered is 'nhd'",
        lambda served: (
            not is_latent(served.pool)  # one row a token
            and served.pool.kv_cache_layout != "nhd"
            and f"the pool's layout is {served.pool.kv_cache_layout!r}"
        ),
    ),
    Refusal(
        "`quantizer.name: engine` in a pool of the model's own dtype",
        "nothing is quantized",
        "start the server with the `--kv-cache-dtype` to be metered",
        lambda served: (
            served.policy.meters_engine
            and served.pool.dtype == served.dtype
            and f"quantizer.name: engine, but the pool keeps the model's own {str(served.dtype).removeprefix('torch.')}"
        ),
    ),
    Refusal(
        "`quantizer.name: engine` in an nvfp4 pool",
        "it is read by kernels only, so what they read is not known",
        "name a quantizer in the policy and use `--kv-cache-dtype auto`",
        _kernels_alone,
    ),
    Refusal(
        "pools of another dtype than the policy's storage has",
        "what the meter writes would be rounded once more",
        "metered are float32, float16 and bfloat16, and int8 under `quantizer.storage: packed`",
        lambda served: (
            not served.policy.meters_engine
            and served.pool.dtype not in served.allowed
            and f"the pool's dtype is {served.pool.dtype} under quantizer.storage: {served.policy.quantizer.storage}"
        ),
    ),
)


@dataclass(frozen=True)
class FlashInfer:
    """SGLang's `FlashInferAttnBackend`, and the scales of the layers that have any."""

    backend: Any
    scales: Mapping[int, tuple[float, float]]


_ENGINE_IN_FLASHINFER = "quantizer.name: engine with attention backend flashinfer and"
FLASHINFER_ROWS: tuple[Refusal[FlashInfer], ...] = (
    Refusal(
        "with `flashinfer` and `SGLANG_FLASHINFER_USE_PAGED`",
        "chunks read what they stored",
        "unset it",
        lambda found: found.backend.use_paged and f"{_ENGINE_IN_FLASHINFER} SGLANG_FLASHINFER_USE_PAGED",
    ),
    Refusal(
        "with `flashinfer` and deterministic inference",
        "chunks read what they stored",
        "leave it out",
        lambda found: found.backend.enable_deterministic and f"{_ENGINE_IN_FLASHINFER} deterministic inference",
    ),
    Refusal(
        "with `flashinfer` and a multimodal model",
        "chunks read what they stored",
        "use another model",
        lambda found: found.backend.is_multimodal and f"{_ENGINE_IN_FLASHINFER} a multimodal model",
    ),
    Refusal(
        "with `flashinfer` and an fp8 cache with scales",
        "its witnesses are not in the units of the codes",
        "leave the scales of `--kv-cache-dtype` out (they are 1 then), or use `--kv-cache-dtype auto`",
        lambda found: (
            any(pair != (1.0, 1.0) for pair in found.scales.values())
            and f"{_ENGINE_IN_FLASHINFER} an fp8 cache with scales"
        ),
    ),
)


def _named(what: str, layer: Any) -> str:
    return f"attention layer {layer.layer_id} uses {what}"


def _not_causal(layer: Any) -> str | bool:
    from sglang.srt.layers.radix_attention import AttentionType

    return layer.attn_type != AttentionType.DECODER and _named(f"{layer.attn_type.value} attention", layer)


_NOT_FOLLOWED = "the meter follows causal softmax over a layer's own keys"
_OTHER_MODEL = "metered are models without it"
LAYER_ROWS: tuple[Refusal[Any], ...] = (
    Refusal(
        "layers with cross-attention",
        _NOT_FOLLOWED,
        _OTHER_MODEL,
        lambda layer: layer.is_cross_attention and _named("cross-attention", layer),
    ),
    Refusal("layers with bidirectional or encoder attention", _NOT_FOLLOWED, _OTHER_MODEL, _not_causal),
    Refusal(
        "layers with chunked local attention (iRoPE)",
        _NOT_FOLLOWED,
        _OTHER_MODEL,
        lambda layer: layer.use_irope and _named("chunked local attention (iRoPE)", layer),
    ),
    Refusal(
        "layers with a temperature that depends on position",
        _NOT_FOLLOWED,
        _OTHER_MODEL,
        lambda layer: (layer.xai_temperature_len or 0) > 0 and _named("a temperature that depends on position", layer),
    ),
    Refusal(
        "layers with a bias of positions in the logits (ALiBi)",
        _NOT_FOLLOWED,
        _OTHER_MODEL,
        lambda layer: (
            layer.pos_encoding_mode != "NONE"
            and _named(f"position encoding {layer.pos_encoding_mode} in the logits", layer)
        ),
    ),
)
ONE_LAYER_EACH: Refusal[None] = Refusal(
    "layers of a pool that belong to no attention layer, or to several",
    "a write would not be metered where it is read",
    "metered are models in which every layer of the pool belongs to one attention layer",
)
ONE_SHAPE: Refusal[None] = Refusal(
    "layers of other heads than the pool that keeps them (`--disable-hybrid-swa-memory`, where layers differ in shape)",
    "what is written there is not a layer's own keys and values",
    "leave that option out",
)


def check_pool(pool: Any, policy: Policy, dtype: torch.dtype) -> list[SubPool]:
    """The pools of keys and values within SGLang's `pool`; UnsupportedError for one that is not followed.

    dtype: the model's.
    """
    refuse(OUTER_POOL_ROWS, ServedPool(pool, policy, dtype))
    found = sub_pools(pool)
    for sub in found:
        refuse(POOL_ROWS, ServedPool(sub.pool, policy, dtype))
    return found


def check_layers(model: Any, pool: Any) -> list[Any]:
    """The attention layers; UnsupportedError for some that do more than causal softmax over their own keys.

    pool: SGLang's. Of two that share a layer of latents that which attends to the latents themselves.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    beside = getattr(model, "attention_instances", {}).values()  # of a model that is Transformers' own
    layers = [module for module in (*model.modules(), *beside) if isinstance(module, RadixAttention)]
    subs = sub_pools(pool)
    latent = {layer: sub.pool.kv_cache_dim for sub in subs if is_latent(sub.pool) for layer in sub.layers}
    layers = [layer for layer in layers if layer.qk_head_dim == latent.get(layer.layer_id, layer.qk_head_dim)]
    ids = sorted(layer.layer_id for layer in layers)
    kept = sorted(layer for sub in subs for layer in sub.layers)
    if ids != kept:
        raise ONE_LAYER_EACH.error(f"the model has attention layers {ids} over a pool of layers {kept}")
    check_query_heads(layer.tp_q_head_num for layer in layers)
    pools = {layer: sub.pool for sub in subs for layer in sub.layers if not is_latent(sub.pool)}
    for layer in layers:
        refuse(LAYER_ROWS, layer)
        pool = pools.get(layer.layer_id)
        own = layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim
        if pool is not None and own != (pool.head_num, pool.head_dim, pool.v_head_dim):
            room = pool.head_num, pool.head_dim, pool.v_head_dim
            said = f"KV heads, channels of keys and values {own} in a pool for {room}"
            raise ONE_SHAPE.error(f"attention layer {layer.layer_id} has {said}")
    return layers
