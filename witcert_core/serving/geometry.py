"""The shape of the cache one process serves; an adapter reads it from its engine's own objects."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from witcert_core.quantizers.rotary import RotarySpec


@dataclass(frozen=True)
class Geometry:
    """One rank's cache, or one group of its layers, all of one shape: layer ids are global, heads are this rank's,
    SLOTS counts padding slots as well.

    pool_dtype: what an unquantized pool would hold, the dtype in which a key counts as exact. window: tokens before
    its own that a row still finds in the cache, None where none leave it; null_slots: how many of the first slots hold
    no token, and stand for those that have left. Of a latent cache (`rotary.latent_dim`) there is one KV head, and a
    value is the first `v_head_dim` channels of its key.
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
    window: int | None = None
    null_slots: int = 0

    @property
    def latent(self) -> bool:
        """Whether values are read out of keys (multi-head latent attention)."""
        return self.rotary.latent_dim > 0
