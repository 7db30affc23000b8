"""vLLM's cache as a packed one, of dithered INT8 or of a coded quantizer's bytes: what vLLM is told, and its memory.

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

from witcert_core import Policy, Quantizer
from witcert_core.errors import UnsupportedError
from witcert_core.serving import CodedLayer, KVLayout, PackedLayer, capacity, of_latents


def layout_of(quantizer: Quantizer, head_dim: int, latent: bool = False) -> KVLayout:
    """The bytes of a token and KV head, 272 at head_dim 128; of a row of latents 612 at 576."""
    return KVLayout(
        head_dim,
        stored_witness=quantizer.stored_witness,
        bypass_pairs=quantizer.bypass_pairs,
        values_in_keys=latent,
    )


def packed_backend(base: type[Any], policy: Policy) -> type[Any]:
    """The backend class `base` with pages of codes."""
    return type(f"Packed{base.__name__}", (PackedBackend, base), {"policy": policy})


class PackedBackend(AttentionBackend):
    """What is added to a backend whose pages hold codes."""

    policy: Policy

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """vLLM computes capacity from these bytes, and says so in its log."""
        quantizer = cls.policy.resolved_quantizer
        if cls.policy.stores_parts:
            size = sum(capacity.coded_bytes(quantizer, spec.head_size, spec.head_size_v))
        else:
            size = layout_of(quantizer, spec.head_size, cls.is_mla()).bytes_per_token_head
        return replace(spec, dtype=torch.int8, state_content_bytes=size)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)


def _by_slot(kv_cache: Tensor) -> Tensor:
    """Pages [BLOCKS, N, Hkv, bytes] of a layer's cache [BLOCKS, Hkv, N, bytes]."""
    pages = kv_cache.transpose(1, 2)
    if not pages.is_contiguous():
        raise UnsupportedError("vLLM did not lay its pages out by slot, so they cannot be packed; unset WITCERT_POLICY")
    return pages


def coded_layer(kv_cache: Tensor, k_bytes: int) -> CodedLayer:
    """The bytes inside a layer's cache [BLOCKS, Hkv, N, bytes] int8: those of a key, then those of its value."""
    rows = _by_slot(kv_cache).flatten(0, 1)
    return CodedLayer(rows[..., :k_bytes], rows[..., k_bytes:])


def packed_layer(kv_cache: Tensor, layout: KVLayout, model_dtype: torch.dtype, latent_dim: int = 0) -> PackedLayer:
    """The buffers inside a layer's cache [BLOCKS, Hkv, N, bytes] int8; every slot is marked as never written.

    model_dtype: what bypassed channels are kept in. latent_dim: of values that are the leading channels of keys.
    """
    pages = _by_slot(kv_cache)
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
