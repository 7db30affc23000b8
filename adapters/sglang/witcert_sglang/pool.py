"""SGLang's pool, read and written by slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from witcert_core.errors import UnsupportedError
from witcert_sglang.sub_pools import sub_pools


class SlotPool:
    """The core's `Pool` over SGLang's, each layer by the slots of the pool that keeps it (`sub_pools`)."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self._at = {
            layer: (sub.pool, sub.pool.start_layer + i) for sub in sub_pools(pool) for i, layer in enumerate(sub.layers)
        }

    def _buffers(self, layer: int) -> tuple[Tensor, Tensor]:
        pool, number = self._at[layer]
        return pool.get_key_buffer(number), pool.get_value_buffer(number)

    def pages(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Pages of one token: SGLang's tables name slots."""
        keys, values = self._buffers(layer)
        return keys[:, None], values[:, None]

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._buffers(layer)
        return keys.index_select(0, slots), values.index_select(0, slots)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        pool, number = self._at[layer]
        # The pool asks its layer for the id alone.
        pool.set_kv_buffer(SimpleNamespace(layer_id=number), KVWriteLoc(slots, None), k, v)

    def restore(self, layer: int, slots: Tensor, head: int, k: Tensor, v: Tensor) -> None:
        keys, values = self._buffers(layer)
        keys[slots, head] = k.to(keys)
        values[slots, head] = v.to(values)


class EnginePool(SlotPool):
    """A pool that SGLang quantizes itself, read as its attention reads it: in the model's dtype, times its scales.

    scales: layer -> (k_scale, v_scale) that the backend multiplies with; layers left out have none.
    """

    def __init__(self, pool: Any, dtype: torch.dtype, scales: Mapping[int, tuple[float, float]]) -> None:
        super().__init__(pool)
        self.dtype = dtype
        self.scales = dict(scales)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (x.to(self.dtype) for x in self.stored(layer, slots))
        if layer in self.scales:
            k_scale, v_scale = self.scales[layer]
            k, v = k.float() * k_scale, v.float() * v_scale  # as kernels do, in float32
        return k, v

    def pages(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """None where the numbers in the buffers are not those that attention reads."""
        return None if self.pool.is_quantized_kv_cache or layer in self.scales else super().pages(layer)

    def stored(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Without scales of the layer; a pool with scales of its own is unpacked for these slots only."""
        pool = self.pool
        if not pool.is_quantized_kv_cache:
            # As bytes: not every device gathers 8-bit floats.
            buffers = pool.get_key_buffer(layer), pool.get_value_buffer(layer)
            k, v = (x.view(torch.uint8)[slots].view(x.dtype) for x in buffers)
            return k, v
        if not pool.quant_method.needs_plain_kv_dequant_read():
            raise UnsupportedError(
                f"the {pool.quant_method.name} pool is read by kernels only: what they read cannot be metered"
            )
        local = layer - pool.start_layer
        k, v = (
            pool.quant_method.dequantize_kv_tensor(codes[local][slots], steps[local][slots], layer)
            for codes, steps in ((pool.k_buffer, pool.k_scale_buffer), (pool.v_buffer, pool.v_scale_buffer))
        )
        return k, v

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        raise UnsupportedError("the engine's own cache is written by the engine only")

    def restore(self, layer: int, slots: Tensor, head: int, k: Tensor, v: Tensor) -> None:
        raise UnsupportedError("the engine's own cache has no room for exact blocks")


def backend_scales(layers: Iterable[Any], backend: str) -> dict[int, tuple[float, float]]:
    """The scales by which `backend` multiplies what it reads; UnsupportedError for a layer with one of two.

    torch_native stores and reads as if there were none.
    """
    found = {}
    for layer in layers:
        scales = layer.k_scale_float, layer.v_scale_float
        if backend == "torch_native" or scales == (None, None):
            continue
        if None in scales:
            raise UnsupportedError(f"layer {layer.layer_id} has the scales {scales}: keys and values need one each")
        found[layer.layer_id] = scales
    return found
