"""Bytes a token takes beside vLLM's own cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from witcert_core.bands import band_map
from witcert_core.rotary import RotarySpec
from witcert_vllm.geometry import rotary_dim
from witcert_vllm.plugin import Installation

ROW_ID_BYTES = 8


def side_bytes_per_token(installation: Installation, vllm_config: Any, specs: Mapping[str, Any]) -> int:
    """Bytes of a token in the side tensors of all layers of this rank, plus its row id."""
    policy, quantizer = installation.policy, installation.quantizer
    if policy.quantizer.storage == "packed":
        return ROW_ID_BYTES
    model = vllm_config.model_config
    total = ROW_ID_BYTES
    for spec in specs.values():
        groups = -(-spec.head_size // 32)
        rotary = RotarySpec(spec.head_size, rotary_dim=rotary_dim(model.hf_text_config, spec.head_size))
        bands = band_map(rotary).num_bands
        if quantizer.tier == "dither":
            sixteen_bit = model.dtype.itemsize == 2
            per_head = 1 + 2 * groups + (groups if quantizer.stored_witness else 0) + (bands if sixteen_bit else 0)
        else:
            per_head = 1 + bands
        total += spec.num_kv_heads * per_head
    return total
