"""vLLM's cache as a packed INT8 cache: what vLLM is told of a token's bytes, and its memory as codes and scales.

vLLM counts `[BLOCKS, N, Hkv, bytes]` for a layer and hands out slots. Within that memory each field of all slots lies
by itself, as kernels read it: vLLM neither copies nor clears the blocks of a cache of one kind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheLayout

from witcert_core import Quantizer
from witcert_core.errors import UnsupportedError
from witcert_core.serving import KVLayout, PackedLayer, of_latents


def layout_of(quantizer: Quantizer, head_dim: int, latent: bool = False) -> KVLayout:
    """The bytes of a token and KV head, 272 at head_dim 128; of a row of latents 612 at 576."""
    return KVLayout(
        head_dim,
        stored_witness=quantizer.stored_witness,
        bypass_pairs=quantizer.bypass_pairs,
        values_in_keys=latent,
    )


def packed_backend(base: type[Any], quantizer: Quantizer) -> type[Any]:
    """The backend class `base` with pages of codes and scales."""

    return type(f"Packed{base.__name__}", (PackedBackend, base), {"quantizer": quantizer})


class PackedBackend(AttentionBackend):
    """What is added to a backend whose pages hold codes and scales."""

    quantizer: Quantizer

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """vLLM computes capacity from these bytes, and says so in its log."""
        size = layout_of(cls.quantizer, spec.head_size, cls.is_mla()).bytes_per_token_head
        return replace(spec, dtype=torch.int8, state_content_bytes=size)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)


def packed_layer(kv_cache: Tensor, layout: KVLayout, model_dtype: torch.dtype, latent_dim: int = 0) -> PackedLayer:
    """The buffers inside a layer's cache [BLOCKS, Hkv, N, bytes] int8; every slot is marked as never written.

    model_dtype: what bypassed channels are kept in. latent_dim: of values that are the leading channels of keys.
    """
    pages = kv_cache.transpose(1, 2)
    if not pages.is_contiguous():
        raise UnsupportedError("vLLM did not lay its pages out by slot, so they cannot be packed; unset WITCERT_POLICY")
    num_slots, num_heads = pages.shape[0] * pages.shape[1], pages.shape[2]
    memory, fields = pages.view(-1), layout.fields()

    def part(name: str, dtype: torch.dtype = torch.int8) -> Tensor:
        first, size = (num_slots * num_heads * bytes_ for bytes_ in fields[name])
        return memory[first : first + size].view(dtype).view(num_slots, num_heads, -1)

    witness = part("k_witness", torch.uint8) if "k_witness" in fields else None
    scales = [part(name, torch.float16) for name in ("k_scales", "v_scales") if name in fields]
    for scale in scales:
        scale.fill_(float("inf"))  # nothing written: the radius is unknown
    if witness is not None:
        witness.fill_(255)
    if layout.values_in_keys:
        return of_latents(part("k_codes"), scales[0], latent_dim, witness)
    outliers = part("k_bypass", model_dtype) if "k_bypass" in fields else None
    return PackedLayer(part("k_codes"), part("v_codes"), scales[0], scales[1], witness, outliers)
