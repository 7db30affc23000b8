"""vLLM's own quantized caches, read as its attention reads them (policy `quantizer: {name: engine}`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from witcert_core.errors import UnsupportedError
from witcert_vllm.pool import PagePool, cpu_views, plain_views

FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
PER_TOKEN_HEAD = {"int8_per_token_head": torch.int8, "fp8_per_token_head": torch.float8_e4m3fn}
SCALE_BYTES = 4  # a float32 after the codes of a token and head


class EnginePool(PagePool):
    """Read-only: the cache is the engine's to write."""

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        raise UnsupportedError("the engine's own cache is written by the engine only")

    def restore(self, layer: int, slots: Tensor, head: int, k: Tensor, v: Tensor) -> None:
        raise UnsupportedError("the engine's own cache has no room for exact blocks")


class Float8Pool(EnginePool):
    """One byte a channel, times one scale each for keys and values of a layer.

    layers: views of the bytes, as in `PagePool`; scales: (k_scale, v_scale) by layer.
    """

    def __init__(
        self,
        layers: Mapping[int, tuple[Tensor, Tensor]],
        block_size: int,
        dtype: torch.dtype,
        scales: Mapping[int, tuple[float, float]],
    ) -> None:
        super().__init__(layers, block_size)
        self.dtype = dtype
        self.scales = dict(scales)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().read(layer, slots)
        k_scale, v_scale = self.scales[layer]
        return k.view(self.dtype).float() * k_scale, v.view(self.dtype).float() * v_scale


class PerTokenHeadPool(EnginePool):
    """Codes and a float32 scale for every token and head: 2 * (D + 4) bytes, 264 at head_dim 128.

    layers: codes and scale, of keys as [BLOCKS, Hkv, D + 4, N] and of values as [BLOCKS, Hkv, N, D + 4] bytes.
    """

    def __init__(self, layers: Mapping[int, tuple[Tensor, Tensor]], block_size: int, dtype: torch.dtype) -> None:
        super().__init__(layers, block_size)
        self.dtype = dtype

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (self._decode(x) for x in super().read(layer, slots))
        return k, v

    def _decode(self, content: Tensor) -> Tensor:
        codes, scale = content.contiguous().split([content.shape[-1] - SCALE_BYTES, SCALE_BYTES], -1)
        return codes.contiguous().view(self.dtype).float() * scale.contiguous().view(torch.float32)


def engine_pool(layers: Mapping[str, Any], ids: Mapping[str, int], block_size: int) -> EnginePool:
    """The pool over vLLM's `Attention` layers by name; UnsupportedError for a cache that cannot be read back."""
    first = next(iter(layers.values()))
    dtype, backend = first.kv_cache_dtype, first.attn_backend.get_name()
    for name, layer in layers.items():
        if layer.kv_cache_dtype != dtype:
            raise UnsupportedError(f"layer {name} keeps {layer.kv_cache_dtype}, others {dtype}; metered is one for all")
        if layer.query_quant is not None:
            raise UnsupportedError(f"layer {name} quantizes its queries as well, which no radius covers")
    if dtype in FLOAT8 and backend == "CPU_ATTN":
        views = {ids[name]: cpu_views(layer.kv_cache, layer.head_size, layer.isa) for name, layer in layers.items()}
        scales = {ids[name]: (layer._k_scale_float, layer._v_scale_float) for name, layer in layers.items()}
        return Float8Pool(views, block_size, FLOAT8[dtype], scales)
    if dtype in PER_TOKEN_HEAD and backend == "TRITON_ATTN":
        halves = {
            ids[name]: plain_views(layer.kv_cache.view(torch.int8), layer.head_size + SCALE_BYTES)
            for name, layer in layers.items()
        }
        return PerTokenHeadPool(halves, block_size, PER_TOKEN_HEAD[dtype])
    raise UnsupportedError(
        f"quantizer.name: engine: what {backend} reads of a {dtype} cache is not known; metered are "
        f"{', '.join(FLOAT8)} on CPU_ATTN and {', '.join(PER_TOKEN_HEAD)} on TRITON_ATTN"
    )
