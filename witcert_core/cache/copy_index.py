"""Which slots of an engine's pool have something kept beside it in host memory, of which there is room for a few only.

Shapes: SLOTS slots of the pool, COPIES places for what is kept, N slots asked about.

A copy belongs to the token last written into its slot; when all places are taken, those used longest ago go first.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_COPY = -1


class CopyIndex:
    """The index of up to `num_copies` copies, at most one a slot."""

    def __init__(self, num_slots: int, num_copies: int) -> None:
        count = min(num_copies, num_slots)
        self._copy_of = torch.full((num_slots,), NO_COPY, dtype=torch.int64)
        self._slot_of = torch.full((count,), NO_COPY, dtype=torch.int64)
        self._used = torch.zeros(count, dtype=torch.int64)
        self._clock = 0

    @property
    def num_copies(self) -> int:
        return int(self._slot_of.numel())

    @property
    def room(self) -> int:
        """Places that are free or were not used since the clock last advanced."""
        return int((self._used < self._clock).sum())

    def advance(self) -> None:
        """What is used from here on was used later than all before."""
        self._clock += 1

    def claim(self, slots: Tensor, *, advance: bool = True) -> None:
        """Make room for the tokens about to be written into `slots` [N]; their former copies are void.

        Of more slots than there are places only the last ones are kept.
        """
        slots = _on_host(slots)
        if advance:
            self.advance()
        self._release(slots)
        wanted = slots[-self.num_copies :]
        # Free places carry the oldest stamp of all, so they are taken before anything is evicted.
        places = torch.argsort(self._used, stable=True)[: wanted.numel()]
        evicted = self._slot_of[places]
        self._copy_of[evicted[evicted != NO_COPY]] = NO_COPY
        self._slot_of[places] = wanted
        self._copy_of[wanted] = places
        self._used[places] = self._clock

    def find(self, slots: Tensor) -> Tensor:
        """int64 [N] on the host: the copy of each of `slots` [N], NO_COPY without one."""
        found: Tensor = self._copy_of[_on_host(slots)]
        return found

    def has(self, slots: Tensor) -> Tensor:
        """bool [N], where `slots` are: whether each has a copy."""
        return (self.find(slots) != NO_COPY).to(slots.device)

    def drop(self, slots: Tensor) -> None:
        """Forget what was kept of `slots` [N]: something else is in them now."""
        self._release(_on_host(slots))

    def touch(self, slots: Tensor) -> None:
        """Count what is kept of `slots` [N] as used now: a request being served reads them."""
        copies = self.find(slots)
        self._used[copies[copies != NO_COPY]] = self._clock

    def _release(self, slots: Tensor) -> None:
        copies = self._copy_of[slots]
        copies = copies[copies != NO_COPY]
        self._slot_of[copies] = NO_COPY
        self._used[copies] = 0
        self._copy_of[slots] = NO_COPY


def _on_host(slots: Tensor) -> Tensor:
    """What is kept and its index lie there, wherever the pool does."""
    return slots.to("cpu", torch.int64)
