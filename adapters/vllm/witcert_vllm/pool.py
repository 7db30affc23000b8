"""vLLM's KV cache, read and written by slot, in the layouts of its backends; its own quantized caches, read as its
attention reads them (policy `quantizer: {name: engine}`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from witcert_core.errors import UnsupportedError

READABLE_ISA = ("vec", "vec16")
"""Layouts of vLLM's CPU kernel that `cpu_views` reads; its AMX tiles interleave pairs of channels."""
FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
PER_TOKEN_HEAD = {"int8_per_token_head": torch.int8, "fp8_per_token_head": torch.float8_e4m3fn}
SCALE_BYTES = 4  # a float32 after the codes of a token and head


class PagePool:
    """The core's `Pool` over views of vLLM's cache.

    layers: keys [BLOCKS, Hkv, D, N] and values [BLOCKS, Hkv, N, Dv] by global layer id; N may differ between cache
    groups.
    """

    def __init__(self, layers: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        self.layers = dict(layers)

    def block_size(self, layer: int) -> int:
        return self.layers[layer][0].shape[-1]

    def _places(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks, and places in them."""
        size = self.block_size(layer)
        return slots // size, slots % size

    def pages(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Keys [BLOCKS, N, Hkv, D] and values [BLOCKS, N, Hkv, Dv]; None where a key's channels lie apart."""
        keys, values = self.layers[layer]
        k, v = keys.permute(0, 3, 1, 2), values.transpose(1, 2)
        return (k, v) if k.stride(-1) == v.stride(-1) == 1 else None

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.layers[layer]
        block, inside = self._places(layer, slots)
        return keys[block, :, :, inside], values[block, :, inside]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        keys, values = self.layers[layer]
        block, inside = self._places(layer, slots)
        keys[block, :, :, inside] = k.to(keys)
        values[block, :, inside] = v.to(values)

    def restore(self, layer: int, slots: Tensor, head: int, k: Tensor, v: Tensor) -> None:
        keys, values = self.layers[layer]
        block, inside = self._places(layer, slots)
        keys[block, head, :, inside] = k.to(keys)
        values[block, head, inside] = v.to(values)


class LatentPool:
    """The core's `Pool` over caches [BLOCKS, N, D] of latents: a value is the first channels of its key.

    layers: by global layer id. No kernel reads such rows yet, so there are no `pages`.
    """

    def __init__(self, layers: Mapping[int, Tensor], latent_dim: int) -> None:
        self.layers = {layer: cache.flatten(0, 1) for layer, cache in layers.items()}
        self.latent_dim = latent_dim
        self._block_sizes = {layer: cache.shape[1] for layer, cache in layers.items()}

    def block_size(self, layer: int) -> int:
        return self._block_sizes[layer]

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.layers[layer][slots, None]
        return rows, rows[..., : self.latent_dim]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """v is a part of k."""
        self.layers[layer][slots] = k[:, 0].to(self.layers[layer])

    def restore(self, layer: int, slots: Tensor, head: int, k: Tensor, v: Tensor) -> None:
        self.layers[layer][slots] = k.to(self.layers[layer])


def cpu_views(kv_cache: Tensor, head_dim: int, isa: str) -> tuple[Tensor, Tensor]:
    """Views of CPU_ATTN's cache [BLOCKS, Hkv, N, 2 * D]: a head's block is its keys, transposed, then its values."""
    if isa not in READABLE_ISA:
        raise UnsupportedError(
            f"vLLM's CPU attention keeps its cache for {isa!r} kernels here; the meter reads "
            f"{' and '.join(map(repr, READABLE_ISA))}"
        )
    blocks, heads, size, _ = kv_cache.shape
    halves = kv_cache.view(blocks, heads, 2, size * head_dim)
    return halves[:, :, 0].unflatten(-1, (head_dim, size)), halves[:, :, 1].unflatten(-1, (size, head_dim))


def plain_views(kv_cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Views of a cache [BLOCKS, Hkv, N, D + Dv] of any strides, as the GPU backends keep it."""
    return kv_cache[..., :head_dim].transpose(2, 3), kv_cache[..., head_dim:]


def check_layout(
    pool: PagePool | LatentPool,
    layer: int,
    kv_cache: Tensor,
    update: Callable[[Tensor, Tensor, Tensor], Any],
    k_shape: tuple[int, int],
    v_shape: tuple[int, int],
    dtype: torch.dtype,
    tolerance: float = 0.0,
    backend: str = "vLLM",
) -> None:
    """Write a pattern through vLLM, read it back through the pool, and put the first two blocks back as they were.

    update(k, v, slots) is vLLM's own write of k [S, *k_shape] and v [S, *v_shape] in `dtype`. UnsupportedError if what
    comes back is off by more than `tolerance` times the pattern's largest entry.
    """
    before = kv_cache[:2].clone()
    size = pool.block_size(layer)
    slots = torch.arange(size - 3, size + 5, device=kv_cache.device)  # across two blocks

    def pattern(shape: tuple[int, int], period: int) -> Tensor:
        """Small integers, exact in every float format a cache can have."""
        count = slots.numel() * shape[0] * shape[1]
        return (torch.arange(count, device=kv_cache.device) % period - period // 2).view(-1, *shape).to(dtype)

    k, v = pattern(k_shape, 15), pattern(v_shape, 13)
    if isinstance(pool, LatentPool):
        v = k[..., : pool.latent_dim]
    update(k, v, slots)
    read = pool.read(layer, slots)
    kv_cache[:2] = before
    for found, written in zip(read, (k, v), strict=True):
        if not float((found.float() - written.float()).abs().max()) <= tolerance * float(written.float().abs().max()):
            raise UnsupportedError(
                f"the cache of attention backend {backend} does not give back what was written to it in the layout the "
                "meter knows; install the vLLM version that docs/limits.md names, choose another "
                "--attention-backend, or unset WITCERT_POLICY to serve without a meter"
            )


class EnginePool(PagePool):
    """Read-only: the cache is the engine's to write, and no kernel of ours knows its scales."""

    def pages(self, layer: int) -> None:
        return None

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
        dtype: torch.dtype,
        scales: Mapping[int, tuple[float, float]],
    ) -> None:
        super().__init__(layers)
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

    def __init__(self, layers: Mapping[int, tuple[Tensor, Tensor]], dtype: torch.dtype) -> None:
        super().__init__(layers)
        self.dtype = dtype

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (self._decode(x) for x in super().read(layer, slots))
        return k, v

    def _decode(self, content: Tensor) -> Tensor:
        codes, scale = content.contiguous().split([content.shape[-1] - SCALE_BYTES, SCALE_BYTES], -1)
        values: Tensor = codes.contiguous().view(self.dtype).float() * scale.contiguous().view(torch.float32)
        return values


def engine_pool(layers: Mapping[str, Any], ids: Mapping[str, int]) -> EnginePool:
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
        return Float8Pool(views, FLOAT8[dtype], scales)
    if dtype in PER_TOKEN_HEAD and backend == "TRITON_ATTN":
        halves = {
            ids[name]: plain_views(layer.kv_cache.view(torch.int8), layer.head_size + SCALE_BYTES)
            for name, layer in layers.items()
        }
        return PerTokenHeadPool(halves, PER_TOKEN_HEAD[dtype])
    raise UnsupportedError(
        f"quantizer.name: engine: what {backend} reads of a {dtype} cache is not known; metered are "
        f"{', '.join(FLOAT8)} on CPU_ATTN and {', '.join(PER_TOKEN_HEAD)} on TRITON_ATTN"
    )
