"""In which order the requests of a pass attend, where some read what others of the same pass write."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from witcert_core.errors import UnsupportedError
from witcert_core.serving.passes import RowPlan


def waves(plan: RowPlan, stored: Sequence[bool]) -> list[list[int]]:
    """The requests of a pass, in the order in which they may attend: those of a wave read nothing that another one of
    the same wave or a later one writes only after its attention (requests i with stored[i] false).

    An engine may hand out a prefix in the very pass that computes it; its codes must be there before they are read.
    """
    count = len(plan.requests)
    late = [i for i in range(count) if not stored[i] and plan.new_tokens[i]]
    if not late or count < 2:
        return [list(range(count))]
    written = torch.cat([plan.requests[i][-plan.new_tokens[i] :] for i in late])
    slots, order = written.sort()
    sizes = torch.tensor([plan.new_tokens[i] for i in late])
    writer = torch.tensor(late).repeat_interleave(sizes).to(order.device)[order]
    prefixes = [seen[: seen.numel() - new] for seen, new in zip(plan.requests, plan.new_tokens, strict=True)]
    lengths = torch.tensor([prefix.numel() for prefix in prefixes])
    read = torch.cat(prefixes)
    reader = torch.arange(count).repeat_interleave(lengths).to(read.device)
    nearest = torch.searchsorted(slots, read).clamp(max=slots.numel() - 1)
    found = slots[nearest] == read
    awaits = torch.unique(torch.stack([reader[found], writer[nearest[found]]], 1), dim=0).tolist()
    wave = [0] * count
    for _ in range(count):
        for mine, other in awaits:
            wave[mine] = max(wave[mine], wave[other] + 1)
    if max(wave) >= count:
        raise UnsupportedError(
            "two requests of a pass each read what the other one computes in it, so no order serves both; unset "
            "WITCERT_POLICY to serve without a meter"
        )
    return [[i for i in range(count) if wave[i] == number] for number in range(max(wave) + 1)]
