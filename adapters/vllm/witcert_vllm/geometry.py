"""The shape of the cache this worker serves, read from vLLM's own objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

from witcert_core import RotarySpec
from witcert_core.serving import Geometry, Ranks, describe
from witcert_vllm.backend import described
from witcert_vllm.drafts import own_layers
from witcert_vllm.refusals.worker import is_latent


def layer_ids(names: list[str]) -> dict[str, int]:
    """Global layer ids by vLLM's layer names, e.g. `model.layers.3.self_attn.attn`."""
    return {name: extract_layer_index(name) for name in names}


def value_width(layer: Any) -> int:
    """Channels of a value of a layer's cache."""
    width: int = layer.kv_lora_rank if is_latent(layer) else layer.head_size_v
    return width


def rotary_spec(config: Any, head_dim: int, latent_dim: int = 0) -> RotarySpec:
    """What RoPE turns of a key; config: vLLM's of the model's language part. latent_dim: 0 of keys of heads."""
    turned = head_dim - latent_dim if latent_dim else rotary_dim(config, head_dim)
    return RotarySpec(head_dim, rotary_dim=turned, latent_dim=latent_dim)


def total_qo_heads(vllm_config: Any) -> int:
    """Query heads of the whole model."""
    parallel = vllm_config.parallel_config
    heads: int = vllm_config.model_config.get_num_attention_heads(parallel) * parallel.tensor_parallel_size
    return heads


def num_hidden_layers(vllm_config: Any) -> int:
    """Layers of the whole model, with or without a cache."""
    return int(vllm_config.model_config.get_total_num_hidden_layers())


@dataclass(frozen=True)
class AttentionGroup:
    """One of vLLM's cache groups with keys and values: its layers by name, the tokens of one of its blocks, and those
    before its own that a row finds in it, None for all."""

    layers: Sequence[str]
    block_size: int
    window: int | None


def attention_groups(kv_cache_config: Any, vllm_config: Any) -> dict[int, AttentionGroup]:
    """Those of vLLM's `KVCacheConfig`, by its own numbers, with the layers of the served model; others hold recurrent
    states, or belong to layers that only make drafts."""
    found = {}
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        names = own_layers(group.layer_names, vllm_config)
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs) and names:
            spec = spec.kv_cache_specs[names[0]]
        if names and not isinstance(spec, MambaSpec):
            window = spec.sliding_window - 1 if isinstance(spec, SlidingWindowSpec) else None
            found[number] = AttentionGroup(names, spec.block_size, window)
    return found


def of_one_shape(layers: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Attention layers by name, those with as many KV heads of as many channels together."""
    found: dict[tuple[int, ...], dict[str, Any]] = {}
    for name, layer in layers.items():
        found.setdefault((layer.num_kv_heads, layer.head_size, value_width(layer)), {})[name] = layer
    return list(found.values())


def block_size(layer: Any) -> int:
    """Tokens of a block in the cache of an attention layer."""
    return int(layer.kv_cache.shape[1 if is_latent(layer) else 2])


def total_kv_heads(config: Any, layer: int) -> int:
    """KV heads of a layer on all ranks together; config: vLLM's `ModelConfig`, whose own number is of one of the
    layers."""
    found = describe(config.hf_config, "this model", config.hf_text_config)
    return next(of.num_kv_heads for of in found.layers if of.index == layer)


def read_geometry(
    vllm_config: Any, layers: Mapping[str, Any], window: int | None, rank: int, num_ranks: int
) -> Geometry:
    """The geometry of `layers` (vLLM's `Attention` or `MLAAttention` by name), of one cache group and one shape, on one
    of the tensor-parallel ranks.

    window: as in `AttentionGroup`. Latents are the same on every rank: one KV head, of which each rank has a part of
    the query heads.
    """
    first = next(iter(layers.values()))
    config = vllm_config.model_config
    # Fewer KV heads than ranks: vLLM gives neighbouring ranks the same one.
    latent = is_latent(first)
    numbers = tuple(sorted(layer_ids(list(layers)).values()))
    total = 1 if latent else total_kv_heads(config, numbers[0])
    local = first.num_kv_heads
    first_head = rank * local if total >= num_ranks else rank * total // num_ranks
    return Geometry(
        backend=described(first.attn_backend.get_name()),
        total_qo_heads=total_qo_heads(vllm_config),
        layers=numbers,
        num_qo_heads=first.num_heads,
        num_kv_heads=local,
        kv_head_ids=tuple(range(first_head, first_head + local)),
        head_dim=first.head_size,
        v_head_dim=value_width(first),
        num_slots=first.kv_cache.shape[0] * block_size(first),
        pool_dtype=config.dtype,
        rotary=rotary_spec(config.hf_text_config, first.head_size, first.kv_lora_rank if latent else 0),
        device=first.kv_cache.device.type,
        window=window,
        null_slots=0 if window is None else 1,  # of block 0, which vLLM fills with nobody's tokens
    )


def rotary_dim(hf_config: Any, head_dim: int) -> int | None:
    """Channels the rotary embedding turns, None for all of them. A post-RoPE witness is sound whatever it is."""
    parameters = getattr(hf_config, "rope_parameters", None) or {}
    factor = getattr(hf_config, "partial_rotary_factor", None) or parameters.get("partial_rotary_factor")
    if factor is None or factor >= 1:
        return None
    return int(head_dim * factor) // 2 * 2


def rotary_modules(model: Any, layer_ids: Mapping[str, int]) -> dict[int, Any]:
    """The `rotary_emb` of the module that holds each attention layer (by name), None where there is none."""
    holders = dict(model.named_modules())
    found: dict[int, Any] = {}
    for name, layer in layer_ids.items():
        holder = holders.get(name.rpartition(".")[0])
        found[layer] = getattr(holder, "rotary_emb", None)
    return found


def tensor_ranks() -> Ranks:
    """The group of this worker, from vLLM."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return Ranks(0, 1, None, 0)
    return Ranks(group.rank_in_group, group.world_size, group.cpu_group, group.ranks[0])
