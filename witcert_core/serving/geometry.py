"""The shape of the cache one process serves; an adapter reads it from its engine's own objects."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from witcert_core.quantizers.rotary import RotarySpec


@dataclass(frozen=True)
class Geometry:
    """One rank's cache: layer ids are global, heads are this rank's, SLOTS counts padding slots as well.

    pool_dtype: what an unquantized pool would hold, the dtype in which a key counts as exact.
    """

    backend: str
    total_qo_heads: int
    layers: tuple[int, ...]
    num_qo_heads: int
    num_kv_heads: int
    kv_head_ids: tuple[int, ...]
    head_dim: int
    v_head_dim: int
    num_slots: int
    pool_dtype: torch.dtype
    rotary: RotarySpec
    device: str
