"""SGLang's pool as a packed INT8 cache: its buffers, its cell size and its dtype.

The pool reports int8, so no fused path of SGLang writes 16-bit keys into it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import KVCacheQuantMethodBase
from torch import Tensor

from witcert_core import Quantizer
from witcert_core.serving import KVLayout, PackedLayer


class PackedMethod(KVCacheQuantMethodBase):
    """Lets `MHATokenToKVPool` allocate codes and scales. Reading and writing go through `PackedKV`."""

    name = "witcert_packed"

    def __init__(self, stored_witness: bool, bypass_pairs: int = 0, model_dtype: torch.dtype = torch.bfloat16) -> None:
        self.stored_witness = stored_witness
        self.bypass_pairs = bypass_pairs
        self.model_dtype = model_dtype
        self.k_witness_buffer: list[Tensor] = []
        self.k_bypass_buffer: list[Tensor] = []

    def create_buffers(self, size: int, head_num: int, head_dim: int, layer_num: int, device: str) -> dict[str, Any]:
        groups = -(-head_dim // 32)

        def buffers(width: int, value: float, dtype: torch.dtype) -> list[Tensor]:
            shape = (size, head_num, width)
            return [torch.full(shape, value, dtype=dtype, device=device) for _ in range(layer_num)]

        if self.stored_witness:
            self.k_witness_buffer = buffers(groups, 255, torch.uint8)
        if self.bypass_pairs:
            self.k_bypass_buffer = buffers(2 * self.bypass_pairs, 0, self.model_dtype)
        return {
            "k_buffer": [
                torch.zeros(size, head_num, head_dim, dtype=torch.int8, device=device) for _ in range(layer_num)
            ],
            "v_buffer": [
                torch.zeros(size, head_num, head_dim, dtype=torch.int8, device=device) for _ in range(layer_num)
            ],
            "k_scale_buffer": buffers(groups, float("inf"), torch.float16),  # infinite: nothing written, radius unknown
            "v_scale_buffer": buffers(groups, float("inf"), torch.float16),
            "dq_k_buffer": None,
            "dq_v_buffer": None,
            "store_dtype": torch.int8,
        }

    def needs_plain_kv_dequant_read(self) -> bool:
        return False

    def compute_cell_size(self, head_num: int, head_dim: int, num_layers: int, kv_size: int) -> int:
        layout = KVLayout(head_dim, stored_witness=self.stored_witness, bypass_pairs=self.bypass_pairs)
        return layout.bytes_per_token_head * head_num * num_layers

    def quantize_and_store(self, *_args: Any, **_kwargs: Any) -> None:
        raise NotImplementedError(
            "a packed WitCert pool is written by its attention backend only; this write is unmetered"
        )

    def dequantize_prev_kv(self, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a packed WitCert pool is read by its attention backend only")


def packed_layers(pool: Any) -> dict[int, PackedLayer]:
    """The pool's buffers by global layer id."""
    witnesses = pool.quant_method.k_witness_buffer or [None] * pool.layer_num
    outliers = pool.quant_method.k_bypass_buffer or [None] * pool.layer_num
    return {
        pool.start_layer + i: PackedLayer(
            pool.k_buffer[i],
            pool.v_buffer[i],
            pool.k_scale_buffer[i],
            pool.v_scale_buffer[i],
            witnesses[i],
            outliers[i],
        )
        for i in range(pool.layer_num)
    }


# Hooks: what SGLang is told about the pool -----------------------------------------------------------------------


def around_configure_dtype(_original: Callable[..., Any], *_args: Any, **_kwargs: Any) -> tuple[str, torch.dtype]:
    """Report int8: models look for a bfloat16 pool before they fuse the write of keys into the rotary embedding."""
    return PackedMethod.name, torch.int8


def around_build_method(quantizer: Quantizer) -> Callable[..., PackedMethod]:
    """The hook that gives the pool its method."""

    def around_build(_original: Callable[..., Any], configurator: Any, **_kwargs: Any) -> PackedMethod:
        return PackedMethod(quantizer.stored_witness, quantizer.bypass_pairs, configurator.model_dtype)

    return around_build
