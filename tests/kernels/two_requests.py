"""Two requests whose passes a test drives through the serving runtime by hand, in scattered slots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from witcert_core.serving.passes import RequestPass
from witcert_core.serving.runtime import Runtime

Pass = list[tuple[int, bool]]  # new tokens of each request, and whether they read what is stored


@contextmanager
def built_for(who: str) -> Iterator[None]:
    """A cache made in this block sums in `who`, "kernels" or "torch", wherever it lies; "asked": as a server would."""
    with pytest.MonkeyPatch.context() as patch:
        if who == "asked":
            yield
            return
        patch.setattr("witcert_core.serving.build.without_kernels", lambda *_: None if who == "kernels" else "a test")
        yield


class TwoRequests:
    """slots [2, 70] among `num_slots`, 0 left out; lens: tokens of each so far. Passes are on `device`."""

    def __init__(self, num_slots: int, gen: torch.Generator, device: str = "cpu") -> None:
        self.device = device
        self.slots = torch.randperm(num_slots - 1, generator=gen)[:140].view(2, 70) + 1
        self.lens = [0, 0]

    def begin(self, runtime: Runtime, new: Pass) -> tuple[list[range], dict[str, Tensor]]:
        """Announce a pass. The positions of each request's new tokens, and what an `AttentionCall` says of them."""
        counts = [n for n, _ in new]
        spans = [range(a, a + n) for a, n in zip(self.lens, counts, strict=True)]
        self.lens = [a + n for a, n in zip(self.lens, counts, strict=True)]
        out_slots = torch.cat([self.slots[i, list(s)] for i, s in enumerate(spans)]).to(self.device)
        requests = [
            RequestPass("ab"[i], self.slots[i, : self.lens[i]].to(self.device), n, attends_quantized=stored)
            for i, (n, stored) in enumerate(new)
        ]
        runtime.begin(requests, out_slots)
        return spans, {
            "slots": out_slots,
            "positions": torch.cat([torch.arange(s.start, s.stop) for s in spans]).to(self.device),
        }
