"""Bytes a token takes, so that SGLang takes the meter's share off the capacity it computes."""

from __future__ import annotations

from typing import Any

from witcert_core.bands import band_map
from witcert_core.layout import KVLayout
from witcert_core.quantizers.base import Quantizer
from witcert_core.rotary import RotarySpec
from witcert_sglang.geometry import rotary_dim

ROW_ID_BYTES = 8


def local_kv_heads(kvc: Any) -> int:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    heads: int = kvc.model_config.get_num_kv_heads(parallel.attn_tp_size, parallel.attn_dcp_size)
    return heads


def packed_bytes_per_head(quantizer: Quantizer, head_dim: int) -> int:
    """Bytes of a token and KV head in the packed pool: 272 at head_dim 128."""
    return KVLayout(head_dim, stored_witness=quantizer.stored_witness).bytes_per_token_head


def packed_bytes_per_token(quantizer: Quantizer, kvc: Any, num_layers: int) -> int:
    """The same for all layers and local heads, and the token's row id."""
    per_head = packed_bytes_per_head(quantizer, kvc.model_config.head_dim)
    return per_head * local_kv_heads(kvc) * num_layers + ROW_ID_BYTES


def side_bytes_per_head(quantizer: Quantizer, config: Any, itemsize: int) -> int:
    """Bytes of a token and KV head in the side tensors beside a pool of `itemsize` bytes an element.

    config: SGLang's ModelConfig.
    """
    groups = -(-config.head_dim // 32)
    rotary = RotarySpec(config.head_dim, rotary_dim=rotary_dim(config.hf_text_config, config.head_dim))
    bands = band_map(rotary).num_bands
    if quantizer.tier == "dither":
        return 1 + 2 * groups + (groups if quantizer.stored_witness else 0) + (bands if itemsize == 2 else 0)
    return 1 + bands


def side_bytes_per_token(quantizer: Quantizer, kvc: Any, num_layers: int) -> int:
    """The same for all layers and local heads, and the token's row id."""
    per_head = side_bytes_per_head(quantizer, kvc.model_config, kvc.kv_cache_dtype.itemsize)
    return num_layers * local_kv_heads(kvc) * per_head + ROW_ID_BYTES
