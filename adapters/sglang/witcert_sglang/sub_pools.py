"""The pools of keys and values of which SGLang's pool may be made up. Importable without SGLang."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SubPool:
    """An `MHATokenToKVPool` or `MLATokenToKVPool`, and the layers of the model that it keeps, in its order.

    windowed: whether its slots are those that `SWAKVPool` translates to.
    """

    pool: Any
    layers: tuple[int, ...]
    windowed: bool = False


def is_latent(pool: Any) -> bool:
    """Whether a pool of SGLang's keeps latents (`MLATokenToKVPool`), not keys and values of heads."""
    return hasattr(pool, "kv_lora_rank")


def sub_pools(pool: Any) -> list[SubPool]:
    """The pools of keys and values within one of SGLang's; that of full attention first."""
    if hasattr(pool, "swa_kv_pool"):
        full, windowed = (
            tuple(layer for layer, (_, slides) in pool.layers_mapping.items() if slides is wanted)
            for wanted in (False, True)
        )
        both = SubPool(pool.full_kv_pool, full), SubPool(pool.swa_kv_pool, windowed, windowed=True)
        return [sub for sub in both if sub.layers]
    if hasattr(pool, "full_attention_layer_id_mapping"):
        return [SubPool(pool.full_kv_pool, tuple(pool.full_attention_layer_id_mapping))]
    return [SubPool(pool, tuple(range(pool.start_layer, pool.start_layer + pool.layer_num)))]
