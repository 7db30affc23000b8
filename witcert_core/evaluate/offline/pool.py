"""The pool of the offline engine: plain tensors, the slot of a token being its position.

Shapes: SLOTS slots, S of them, Hkv KV heads, D head_dim, Dv v_head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from witcert_core.serving.geometry import Geometry


class TensorPool:
    """Keys [SLOTS, Hkv, D] and values [SLOTS, Hkv, Dv] of every layer; of a latent cache values are views of keys.

    geometries: of the layers of each shape.
    """

    def __init__(self, geometries: Sequence[Geometry]) -> None:
        self._k: dict[int, Tensor] = {}
        self._v: dict[int, Tensor] = {}
        for of in geometries:
            lines = of.num_slots, of.num_kv_heads
            for layer in of.layers:
                self._k[layer] = k = torch.zeros(*lines, of.head_dim, dtype=of.pool_dtype)
                values = of.v_head_dim
                self._v[layer] = k[..., :values] if of.latent else torch.zeros(*lines, values, dtype=of.pool_dtype)

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
