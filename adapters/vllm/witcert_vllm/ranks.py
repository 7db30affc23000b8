"""The tensor-parallel group of a worker process."""

from __future__ import annotations

from witcert_core.serving.ranks import Ranks


def tensor_ranks() -> Ranks:
    """The group of this worker, from vLLM."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return Ranks(0, 1, None, 0)
    return Ranks(group.rank_in_group, group.world_size, group.cpu_group, group.ranks[0])
