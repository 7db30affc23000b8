"""The attention tensor-parallel group of a scheduler process."""

from __future__ import annotations

from witcert_core.serving.ranks import Ranks


def attention_ranks() -> Ranks:
    """The group of this scheduler process, from SGLang."""
    from sglang.srt.distributed.parallel_state import get_attn_tp_group
    from sglang.srt.runtime_context import get_parallel

    size = get_parallel().attn_tp_size
    if size == 1:
        return Ranks(0, 1, None, 0)
    group = get_attn_tp_group()
    return Ranks(group.rank_in_group, group.world_size, group.cpu_group, group.ranks[0])
