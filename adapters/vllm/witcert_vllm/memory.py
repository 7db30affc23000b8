"""Bytes a token takes beside vLLM's own cache, so that vLLM takes the meter's share off the capacity it computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from witcert_core import Policy
from witcert_core.serving import QuantizeSchedule, capacity
from witcert_vllm.geometry import rotary_spec


def side_bytes_per_token(policy: Policy, vllm_config: Any, specs: Mapping[str, Any]) -> int:
    """Bytes of a token in the side tensors of all layers of this rank, plus its pass id; `specs` by layer name."""
    quantizer, model = policy.resolved_quantizer, vllm_config.model_config
    if policy.quantizer.storage == "packed":
        return capacity.PASS_ID_BYTES
    (spec, *_others) = specs.values()
    latent = model.hf_text_config.kv_lora_rank if model.use_mla else 0
    rotary = rotary_spec(model.hf_text_config, spec.head_size, latent)
    per_head = capacity.side_bytes_per_head(
        quantizer,
        rotary,
        latent or spec.head_size_v,
        model.dtype.itemsize,
        policy.sketch_bits,
        policy.meter.bands,
    )
    flag = 0 if QuantizeSchedule.of(quantizer).immediate else 1  # whether a token waits to be quantized
    return capacity.side_bytes_per_token(per_head, spec.num_kv_heads, len(specs)) + flag
