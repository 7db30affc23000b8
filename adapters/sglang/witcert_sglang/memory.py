"""Bytes a token takes, so that SGLang takes the meter's share off the capacity it computes."""

from __future__ import annotations

from typing import Any

from witcert_core.cache import capacity
from witcert_core.cache.schedule import QuantizeSchedule
from witcert_core.policy.model import Policy
from witcert_core.quantizers.base import Quantizer
from witcert_core.quantizers.layout import KVLayout
from witcert_core.quantizers.rotary import RotarySpec
from witcert_sglang.geometry import rotary_dim


def local_kv_heads(kvc: Any) -> int:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    heads: int = kvc.model_config.get_num_kv_heads(parallel.attn_tp_size, parallel.attn_dcp_size)
    return heads


def packed_layout(quantizer: Quantizer, head_dim: int) -> KVLayout:
    """The bytes of a token and KV head in the packed pool: 272 at head_dim 128."""
    return KVLayout(head_dim, stored_witness=quantizer.stored_witness, bypass_pairs=quantizer.bypass_pairs)


def packed_bytes_per_token(quantizer: Quantizer, kvc: Any, num_layers: int) -> int:
    """The same for all layers and local heads, and the token's row id."""
    layout = packed_layout(quantizer, kvc.model_config.head_dim)
    return capacity.packed_bytes_per_token(layout, local_kv_heads(kvc), num_layers)


def side_bytes_per_head(policy: Policy, config: Any, itemsize: int) -> int:
    """Bytes of a token and KV head in the side tensors beside a pool of `itemsize` bytes an element.

    config: SGLang's ModelConfig.
    """
    rotary = RotarySpec(config.head_dim, rotary_dim=rotary_dim(config.hf_text_config, config.head_dim))
    return capacity.side_bytes_per_head(
        policy.resolved_quantizer, rotary, config.v_head_dim, itemsize, policy.sketch_bits, policy.meter.bands
    )


def side_bytes_per_token(policy: Policy, kvc: Any, num_layers: int) -> int:
    """The same for all layers and local heads, the token's row id and, if it waits to be quantized, a flag."""
    per_head = side_bytes_per_head(policy, kvc.model_config, kvc.kv_cache_dtype.itemsize)
    flag = 0 if QuantizeSchedule.of(policy.resolved_quantizer).immediate else 1
    return capacity.side_bytes_per_token(per_head, local_kv_heads(kvc), num_layers) + flag
