"""What kernels take of a pass: pages, places and failure probabilities of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from witcert_core.kernels.host.pages import PageTable
from witcert_core.serving.passes import MeteredRow


def visible_tokens(rows: Sequence[MeteredRow], window_left: int) -> list[int]:
    """How many tokens each row sees; window_left negative for no window."""
    seen = [row.position + 1 for row in rows]
    return seen if window_left < 0 else [min(n, window_left + 1) for n in seen]


def token_pages(slots: Sequence[Tensor], device: str | torch.device, page_size: int = 1) -> tuple[PageTable, int]:
    """The pages of requests, of `page_size` slots each, and the longest request's length.

    slots[i] [S_i]: those of request i in order of position, whole pages but the last one. With pages of one slot they
    may lie anywhere, whatever the engine's own page size.
    """
    lengths = [mine.numel() for mine in slots]
    counts = torch.tensor([0, *(-(-length // page_size) for length in lengths)])
    last = torch.tensor([(length - 1) % page_size + 1 for length in lengths], dtype=torch.int32)
    flat = torch.cat([mine[::page_size] for mine in slots]) if slots else torch.zeros(0, dtype=torch.int64)
    indptr = counts.cumsum(0).to(torch.int32)
    pages = (flat // page_size).to(device, torch.int32)
    return PageTable(indptr.to(device), pages, last.to(device)), max(lengths, default=0)


class QuantizedCounts:
    """How many of the tokens that rows see are not exact, counted without waiting for the device.

    requests [S_i]: the tokens of each, one request after the other. What depends on the window is made once for each.
    """

    def __init__(self, requests: Sequence[Tensor], rows: Sequence[MeteredRow], device: torch.device) -> None:
        self._first = [0, *accumulate(slots.numel() for slots in requests)]
        self._rows = list(rows)
        self._device = device
        self._spans: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, exact: Tensor, window_left: int) -> Tensor:
        """Int64 [R, Hkv] for exact bool [M, Hkv] of all tokens."""
        before = torch.nn.functional.pad((~exact).cumsum(0), (0, 0, 1, 0))  # how many there are before each token
        first, end = self._span(window_left)
        return before[end] - before[first]

    def _span(self, window_left: int) -> tuple[Tensor, Tensor]:
        if window_left not in self._spans:
            ends = [self._first[row.request] + row.position + 1 for row in self._rows]
            seen = visible_tokens(self._rows, window_left)
            starts = [end - count for end, count in zip(ends, seen, strict=True)]
            made = (torch.tensor(x, dtype=torch.int64).to(self._device) for x in (starts, ends))
            self._spans[window_left] = (next(made), next(made))
        return self._spans[window_left]


def spend_down(delta_loc: Sequence[float], device: torch.device) -> Tensor:
    """Failure probabilities as the float32 [R] kernels take, never above what may be spent."""
    exact = torch.tensor(list(delta_loc), dtype=torch.float64)
    single = exact.to(torch.float32)
    lower = torch.nextafter(single, torch.zeros_like(single))
    return torch.where(single.to(torch.float64) > exact, lower, single).to(device)
