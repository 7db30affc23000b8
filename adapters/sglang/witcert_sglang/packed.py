"""SGLang's pool as a packed cache, of dithered INT8 or of a coded quantizer's bytes: its buffers, cell size and dtype.

The pool reports int8, so no fused path of SGLang writes 16-bit keys into it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import KVCacheQuantMethodBase
from torch import Tensor

from witcert_core import Policy
from witcert_core.serving import Buffers, CodedLayer, KVLayout, PackedLayer, capacity


class CodesMethod(KVCacheQuantMethodBase):
    """What SGLang is told of a pool that only the metered backend reads and writes."""

    name = "witcert_packed"

    def needs_plain_kv_dequant_read(self) -> bool:
        return False

    def quantize_and_store(self, *_args: Any, **_kwargs: Any) -> None:
        raise NotImplementedError(
            "a packed WitCert pool is written by its attention backend only; this write is unmetered"
        )

    def dequantize_prev_kv(self, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a packed WitCert pool is read by its attention backend only")


class CodedMethod(CodesMethod):
    """Lets `MHATokenToKVPool` allocate so many bytes for a key and for a value. They are `CodedPool`'s to use.

    SGLang moves, shares and frees whole rows of them, so whatever it does with a token it does with all its bytes.
    """

    def __init__(self, k_bytes: int, v_bytes: int) -> None:
        self.k_bytes = k_bytes
        self.v_bytes = v_bytes

    def create_buffers(self, size: int, head_num: int, head_dim: int, layer_num: int, device: str) -> dict[str, Any]:
        def buffers(width: int) -> list[Tensor]:
            return [torch.zeros(size, head_num, width, dtype=torch.int8, device=device) for _ in range(layer_num)]

        return {"k_buffer": buffers(self.k_bytes), "v_buffer": buffers(self.v_bytes), "store_dtype": torch.int8}

    def compute_cell_size(self, head_num: int, head_dim: int, num_layers: int, kv_size: int) -> int:
        return (self.k_bytes + self.v_bytes) * head_num * num_layers


class PackedMethod(CodesMethod):
    """Lets `MHATokenToKVPool` allocate codes and scales. Reading and writing go through `PackedKV`."""

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

    def compute_cell_size(self, head_num: int, head_dim: int, num_layers: int, kv_size: int) -> int:
        layout = KVLayout(head_dim, stored_witness=self.stored_witness, bypass_pairs=self.bypass_pairs)
        return layout.bytes_per_token_head * head_num * num_layers


def packed_layers(pool: Any) -> Buffers:
    """The pool's buffers by global layer id."""
    if isinstance(pool.quant_method, CodedMethod):
        return {pool.start_layer + i: CodedLayer(pool.k_buffer[i], pool.v_buffer[i]) for i in range(pool.layer_num)}
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


def packed_method(policy: Policy, head_dim: int, v_head_dim: int, model_dtype: torch.dtype) -> CodesMethod:
    """The method of a pool that holds the codes of the policy's quantizer."""
    quantizer = policy.resolved_quantizer
    if policy.stores_parts:
        return CodedMethod(*capacity.coded_bytes(quantizer, head_dim, v_head_dim))
    return PackedMethod(quantizer.stored_witness, quantizer.bypass_pairs, model_dtype)


def around_build_method(policy: Policy) -> Callable[..., CodesMethod]:
    """The hook that gives the pool its method."""

    def around_build(_original: Callable[..., Any], configurator: Any, **_kwargs: Any) -> CodesMethod:
        model = configurator.model_config
        return packed_method(policy, model.head_dim, model.v_head_dim, configurator.model_dtype)

    return around_build
