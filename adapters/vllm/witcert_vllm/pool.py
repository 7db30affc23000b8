"""vLLM's KV cache, read and written by slot, in the layouts of its backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from witcert_core.errors import UnsupportedError


class PagePool:
    """The core's `Pool` over views of vLLM's cache.

    layers: keys [BLOCKS, Hkv, D, N] and values [BLOCKS, Hkv, N, Dv] by global layer id; N = block_size.
    """

    def __init__(self, layers: Mapping[int, tuple[Tensor, Tensor]], block_size: int) -> None:
        self.layers = dict(layers)
        self.block_size = block_size

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.layers[layer]
        block, inside = slots // self.block_size, slots % self.block_size
        return keys[block, :, :, inside], values[block, :, inside]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        keys, values = self.layers[layer]
        block, inside = slots // self.block_size, slots % self.block_size
        keys[block, :, :, inside] = k.to(keys)
        values[block, :, inside] = v.to(values)

    def restore(self, layer: int, slots: Tensor, head: int, k: Tensor, v: Tensor) -> None:
        keys, values = self.layers[layer]
        block, inside = slots // self.block_size, slots % self.block_size
        keys[block, head, :, inside] = k.to(keys)
        values[block, head, inside] = v.to(values)


def cpu_views(kv_cache: Tensor, head_dim: int, isa: str) -> tuple[Tensor, Tensor]:
    """Views of CPU_ATTN's cache [BLOCKS, Hkv, N, 2 * D]: a head's block is its keys, transposed, then its values."""
    if isa not in ("vec", "vec16"):
        raise UnsupportedError(
            f"vLLM's CPU attention keeps its cache for {isa!r} kernels here; the meter reads 'vec' and 'vec16'"
        )
    blocks, heads, size, _ = kv_cache.shape
    halves = kv_cache.view(blocks, heads, 2, size * head_dim)
    return halves[:, :, 0].unflatten(-1, (head_dim, size)), halves[:, :, 1].unflatten(-1, (size, head_dim))


def plain_views(kv_cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Views of a cache [BLOCKS, Hkv, N, D + Dv] of any strides, as the GPU backends keep it."""
    return kv_cache[..., :head_dim].transpose(2, 3), kv_cache[..., head_dim:]


def check_layout(
    pool: PagePool,
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
    slots = torch.arange(pool.block_size - 3, pool.block_size + 5, device=kv_cache.device)  # across two blocks

    def pattern(shape: tuple[int, int], period: int) -> Tensor:
        """Small integers, exact in every float format a cache can have."""
        count = slots.numel() * shape[0] * shape[1]
        return (torch.arange(count, device=kv_cache.device) % period - period // 2).view(-1, *shape).to(dtype)

    k, v = pattern(k_shape, 15), pattern(v_shape, 13)
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
