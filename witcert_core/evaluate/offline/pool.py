"""The pool of the offline engine: plain tensors, the slot of a token being its position.

Shapes: SLOTS slots, S of them, Hkv KV heads, D head_dim, Dv v_head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.serving.geometry import Geometry


class TensorPool:
    """Keys [SLOTS, Hkv, D] and values [SLOTS, Hkv, Dv] of every layer."""

    def __init__(self, geometry: Geometry) -> None:
        heads, dtype = geometry.num_kv_heads, geometry.pool_dtype
        self._k = {i: torch.zeros(geometry.num_slots, heads, geometry.head_dim, dtype=dtype) for i in geometry.layers}
        self._v = {i: torch.zeros(geometry.num_slots, heads, geometry.v_head_dim, dtype=dtype) for i in geometry.layers}

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """k [S, Hkv, D] and v [S, Hkv, Dv], copies, of `slots` [S]."""
        return self._k[layer][slots], self._v[layer][slots]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k [S, Hkv, D] and v [S, Hkv, Dv] into `slots` [S]."""
        self._k[layer][slots] = k.to(self._k[layer])
        self._v[layer][slots] = v.to(self._v[layer])

    def restore(self, layer: int, slots: Tensor, head: int, k: Tensor, v: Tensor) -> None:
        """k [S, D] and v [S, Dv] of one head into `slots` [S]."""
        self._k[layer][slots, head] = k.to(self._k[layer])
        self._v[layer][slots, head] = v.to(self._v[layer])
