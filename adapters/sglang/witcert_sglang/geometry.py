"""The shape of the cache this process serves, read from SGLang's own objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from witcert_core import RotarySpec
from witcert_core.serving import Geometry, Ranks, describe
from witcert_sglang.sub_pools import SubPool, is_latent


def read_geometry(
    runner: Any, backend: Any, sub: SubPool, window: int, rank: int = 0, num_ranks: int = 1, own: bool = False
) -> Geometry:
    """The geometry of one of the pools of `runner` (a ModelRunner) under attention backend `backend`, on one of the
    ranks.

    window: tokens before its own that a row of its layers sees at most, as far as the pool forgets others. own: the
    engine's own quantized cache is metered.
    """
    pool = sub.pool
    config = runner.model_config
    sizes = {
        "backend": type(backend).__name__,
        "total_qo_heads": config.num_attention_heads,
        "layers": sub.layers,
        "num_qo_heads": config.num_attention_heads // num_ranks,
        "device": str(pool.device),
    }
    if is_latent(pool):  # the same on every rank, each of which has a part of the query heads
        return Geometry(
            **sizes,
            num_kv_heads=1,
            kv_head_ids=(0,),
            head_dim=pool.kv_cache_dim,
            v_head_dim=pool.kv_lora_rank,
            num_slots=pool.kv_buffer[0].shape[0],
            pool_dtype=pool.dtype,
            rotary=RotarySpec(pool.kv_cache_dim, rotary_dim=pool.qk_rope_head_dim, latent_dim=pool.kv_lora_rank),
        )
    num_kv_heads = pool.head_num
    # Fewer KV heads than ranks: SGLang gives neighbouring ranks the same one.
    total = total_kv_heads(config, sub.layers[0])
    first_kv_head = rank * num_kv_heads if total >= num_ranks else rank * total // num_ranks
    return Geometry(
        **sizes,
        num_kv_heads=num_kv_heads,
        kv_head_ids=tuple(range(first_kv_head, first_kv_head + num_kv_heads)),
        head_dim=pool.head_dim,
        v_head_dim=pool.v_head_dim,
        num_slots=pool.k_buffer[0].shape[0],
        # In a pool of codes, ours or the engine's own, exact is what the model handed over.
        pool_dtype=runner.dtype if own or pool.dtype == torch.int8 else pool.dtype,
        rotary=RotarySpec(pool.head_dim, rotary_dim=rotary_dim(config.hf_text_config, pool.head_dim)),
        window=window if sub.windowed else None,
        null_slots=1 if sub.windowed else 0,
    )


def total_kv_heads(config: Any, layer: int) -> int:
    """KV heads of a layer on all ranks together; config: SGLang's `ModelConfig`, whose own number is of the layers
    without a window."""
    found = describe(config.hf_config, "this model", config.hf_text_config)
    return next(of.num_kv_heads for of in found.layers if of.index == layer)


def rotary_dim(hf_config: Any, head_dim: int) -> int | None:
    """Channels the rotary embedding turns, None for all of them. A post-RoPE witness is sound whatever it is."""
    factor = getattr(hf_config, "partial_rotary_factor", None)
    if factor is None or factor >= 1:
        return None
    return int(head_dim * factor) // 2 * 2


def rotary_modules(model: Any, layers: Sequence[int]) -> dict[int, Any]:
    """The `rotary_emb` beside each attention layer of `model`, None where there is none."""
    from sglang.srt.layers.radix_attention import RadixAttention

    found: dict[int, Any] = dict.fromkeys(layers)
    for module in model.modules():
        rope = getattr(module, "rotary_emb", None)
        for child in module.children():
            if isinstance(child, RadixAttention) and child.layer_id in found and rope is not None:
                found[child.layer_id] = rope
    return found


def attention_ranks() -> Ranks:
    """The group of this scheduler process, from SGLang."""
    from sglang.srt.distributed.parallel_state import get_attn_tp_group
    from sglang.srt.runtime_context import get_parallel

    size = get_parallel().attn_tp_size
    if size == 1:
        return Ranks(0, 1, None, 0)
    group = get_attn_tp_group()
    return Ranks(group.rank_in_group, group.world_size, group.cpu_group, group.ranks[0])
