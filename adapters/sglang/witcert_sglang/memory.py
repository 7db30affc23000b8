"""Bytes a token takes, so that SGLang takes the meter's share off the capacity it computes."""

from __future__ import annotations

from typing import Any

from witcert_core import Policy, RotarySpec
from witcert_core.serving import KVLayout, QuantizeSchedule, capacity
from witcert_sglang.geometry import rotary_dim


def local_kv_heads(kvc: Any, windowed: bool = False) -> int:
    from sglang.srt.runtime_context import get_parallel

    parallel, config = get_parallel(), kvc.model_config
    if windowed:
        return int(config.get_swa_num_kv_heads(parallel.attn_tp_size))
    return int(config.get_num_kv_heads(parallel.attn_tp_size, parallel.attn_dcp_size))


def packed_bytes_per_token(policy: Policy, kvc: Any, num_layers: int) -> int:
    """Bytes of a token in a packed pool, all layers and local heads: codes, what is kept beside them, its pass id."""
    quantizer, config, heads = policy.resolved_quantizer, kvc.model_config, local_kv_heads(kvc)
    if policy.stores_parts:
        both = sum(capacity.coded_bytes(quantizer, config.head_dim, config.v_head_dim))
        return both * heads * num_layers + side_bytes_per_token(policy, kvc, num_layers)
    layout = KVLayout(config.head_dim, stored_witness=quantizer.stored_witness, bypass_pairs=quantizer.bypass_pairs)
    return capacity.packed_bytes_per_token(layout, heads, num_layers)


def side_bytes_per_token(policy: Policy, kvc: Any, num_layers: int, windowed: bool = False) -> int:
    """Bytes of a token in the side tensors of some layers and local heads; its pass id; if it may wait, a flag.

    windowed: of layers in the pool of those with a window, whose heads may be others.
    """
    config, quantizer = kvc.model_config, policy.resolved_quantizer
    if kvc.use_mla_backend:
        latent, turned, heads = config.kv_lora_rank, config.qk_rope_head_dim, 1
        rotary, values = RotarySpec(latent + turned, rotary_dim=turned, latent_dim=latent), latent
    else:
        width, values = config.head_dim, config.v_head_dim
        if windowed:
            width, values = config.swa_head_dim, config.swa_v_head_dim
        turned, heads = rotary_dim(config.hf_text_config, width), local_kv_heads(kvc, windowed)
        rotary = RotarySpec(width, rotary_dim=turned)
    per_head = capacity.side_bytes_per_head(
        quantizer,
        rotary,
        values,
        kvc.kv_cache_dtype.itemsize,
        policy.sketch_bits,
        policy.meter.bands,
    )
    flag = 0 if QuantizeSchedule.of(quantizer).immediate else 1  # whether a token waits to be quantized
    return capacity.side_bytes_per_token(per_head, heads, num_layers) + flag
