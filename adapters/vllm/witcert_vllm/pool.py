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
    pool: PagePool, layer: int, update: Callable[[Tensor, Tensor, Tensor], Any], heads: int, dim: int, v_dim: int
) -> None:
    """Write a pattern through vLLM, read it back through the pool, and clear it; the cache must not be in use yet.

    update(k, v, slots) is vLLM's own write. UnsupportedError if what comes back is anything else.
    """
    keys, _values = pool.layers[layer]
    slots = torch.arange(pool.block_size - 3, pool.block_size + 5, device=keys.device)  # across two blocks
    # Exact in every float format a cache can have.
    k = (torch.arange(slots.numel() * heads * dim, device=keys.device) % 251 - 125).view(-1, heads, dim).to(keys.dtype)
    v = (torch.arange(slots.numel() * heads * v_dim, device=keys.device) % 241 - 120).view(-1, heads, v_dim)
    v = v.to(keys.dtype)
    update(k, v, slots)
    read_k, read_v = pool.read(layer, slots)
    pool.write(layer, slots, torch.zeros_like(k), torch.zeros_like(v))
    if not (torch.equal(read_k, k) and torch.equal(read_v, v)):
        raise UnsupportedError(
            "vLLM's cache does not give back what was written to it in the layout the meter knows; install the vLLM "
            "version that docs/limits.md names, or unset WITCERT_POLICY to serve without a meter"
        )
