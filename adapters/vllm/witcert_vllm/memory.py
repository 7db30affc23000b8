"""Bytes a token takes beside vLLM's own cache, so that vLLM takes the meter's share off the capacity it computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import MambaSpec

from witcert_core import Policy
from witcert_core.serving import QuantizeSchedule, capacity
from witcert_vllm.drafts import own_layers
from witcert_vllm.geometry import rotary_spec


def bytes_per_block(policy: Policy, vllm_config: Any, specs: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes of one of vLLM's blocks in its cache, and beside it; `specs` of all layers by name.

    The cache groups share the blocks; beside them every layer has a place for each.
    """
    groups = get_kv_cache_groups(vllm_config, deepcopy(dict(specs)))  # which changes them
    own = set(own_layers(specs, vllm_config))
    cache, beside = [], 0
    for group in groups:
        of_group = [
            getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            for name in group.layer_names
        ]
        cache.append(sum(spec.page_size_bytes for spec in of_group))
        named = zip(group.layer_names, of_group, strict=True)
        attending = [spec for name, spec in named if name in own and not isinstance(spec, MambaSpec)]
        if attending:
            beside += attending[0].block_size * side_bytes_per_token(policy, vllm_config, attending)
    return max(cache), beside


def side_bytes_per_token(policy: Policy, vllm_config: Any, specs: Sequence[Any]) -> int:
    """Bytes of a token in the side tensors of the layers of a cache group on this rank, plus its pass id and, where it
    may wait to be quantized, a flag: both for each shape of layers."""
    quantizer, model = policy.resolved_quantizer, vllm_config.model_config
    shapes = Counter((spec.num_kv_heads, spec.head_size, spec.head_size_v) for spec in specs)
    if policy.quantizer.storage == "packed" and not policy.stores_parts:
        return capacity.PASS_ID_BYTES * len(shapes)
    latent = model.hf_text_config.kv_lora_rank if model.use_mla else 0
    flag = 0 if QuantizeSchedule.of(quantizer).immediate else 1
    found = 0
    for (heads, width, values), layers in shapes.items():
        per_head = capacity.side_bytes_per_head(
            quantizer,
            rotary_spec(model.hf_text_config, width, latent),
            latent or values,
            model.dtype.itemsize,
            policy.sketch_bits,
            policy.meter.bands,
        )
        found += capacity.side_bytes_per_token(per_head, heads, layers) + flag
    return found
