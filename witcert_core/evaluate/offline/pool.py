"""The pool of the offline engine: plain tensors, the slot of a token being its position.

Shapes: SLOTS slots, S of them, Hkv KV heads, D head_dim, Dv v_head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.serving.geometry import Geometry


class TensorPool:
    """Keys [SLOTS, Hkv, D] and values [SLOTS, Hkv, Dv] of every layer; of a latent cache values are views of keys."""

    def __init__(self, geometry: Geometry) -> None:
        def zeros(width: int) -> Tensor:
            return torch.zeros(geometry.num_slots, geometry.num_kv_heads, width, dtype=geometry.pool_dtype)

        values = geometry.v_head_dim
        self._k = {i: zeros(geometry.head_dim) for i in geometry.layers}
        self._v = {i: k[..., :values] if geometry.latent else zeros(values) for i, k in self._k.items()}

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """k [S, Hkv, D] and v [S, Hkv, Dv], copies, of `slots` [S]."""
        return self._k[layer][slots], self._v[layer][slots]

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Pages of one token: the pool itself, [SLOTS, 1, Hkv, D] and [SLOTS, 1, Hkv, Dv]."""
        return self._k[layer][:, None], self._v[layer][:, None]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k [S, Hkv, D] and v [S, Hkv, Dv] into `slots` [S]."""
        self._k[layer][slots] = k.to(self._k[layer])
        self._v[layer][slots] = v.to(self._v[layer])

    def restore(self, layer: int, slots: Tensor, head: int, k: Tensor, v: Tensor) -> None:
        """k [S, D] and v [S, Dv] of one head into `slots` [S]."""
        self._k[layer][slots, head] = k.to(self._k[layer])
        self._v[layer][slots, head] = v.to(self._v[layer])
