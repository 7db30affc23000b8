"""SGLang's plain pool, read and written by slot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor


class SlotPool:
    """The core's `Pool` over an `MHATokenToKVPool`."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.pool.get_key_buffer(layer)[slots], self.pool.get_value_buffer(layer)[slots]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        # The pool asks its layer for the id alone.
        self.pool.set_kv_buffer(SimpleNamespace(layer_id=layer), KVWriteLoc(slots, None), k, v)

    def restore(self, layer: int, slots: Tensor, head: int, k: Tensor, v: Tensor) -> None:
        keys, values = self.pool.get_key_buffer(layer), self.pool.get_value_buffer(layer)
        keys[slots, head] = k.to(keys)
        values[slots, head] = v.to(values)
