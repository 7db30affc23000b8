"""The tokens that the requests of a pass read, taken out of the pool once and addressed by place, not by slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from witcert_core.meter.audit import FormatError
from witcert_core.meter.protocols import Radii
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.passes import MeteredRow
from witcert_core.serving.storage.attended import RowTokens


@dataclass(frozen=True)
class PlacedRadii:
    """`Radii` by place: token i came from slot `slots[i]`, is exact where `exact[i]` and unknown where `unknown[i]`.

    slots [M] int64, exact and unknown [M] bool or None. Exact tokens have radius 0 but still count in the union over
    tokens; unknown ones have an infinite radius.
    """

    inner: Radii
    slots: Tensor
    exact: Tensor | None = None
    unknown: Tensor | None = None

    def key_radius(self, q: Tensor, slots: Tensor, sm_scale: float, delta_loc: float) -> Tensor:
        """Part of `Radii`, by place."""
        radius = self.inner.key_radius(q, self.slots[slots], sm_scale, delta_loc)
        radius = radius if self.exact is None else radius.masked_fill(self.exact[slots], 0.0)
        return radius if self.unknown is None else radius.masked_fill(self.unknown[slots], float("inf"))

    def value_radius(self, slots: Tensor) -> Tensor:
        """Part of `Radii`, by place."""
        radius = self.inner.value_radius(self.slots[slots])
        radius = radius if self.exact is None else radius.masked_fill(self.exact[slots, None], 0.0)
        return radius if self.unknown is None else radius.masked_fill(self.unknown[slots, None], float("inf"))

    def residuals(self, slots: Tensor) -> tuple[Tensor, Tensor] | None:
        """Part of `Radii`, by place."""
        found = self.inner.residuals(self.slots[slots])
        if found is None or self.exact is None:
            return found
        exact = self.exact[slots, None, None]
        return found[0].masked_fill(exact, 0.0), found[1].masked_fill(exact, 0.0)

    def exact_heads(self, slots: Tensor) -> Tensor:
        """Part of `Radii`, by place."""
        heads = self.inner.exact_heads(self.slots[slots])
        heads = heads if self.exact is None else heads | self.exact[slots, None]
        return heads if self.unknown is None else heads & ~self.unknown[slots, None]


@dataclass(frozen=True)
class Gathered:
    """M tokens, one request after the other: k [M, Hkv, D], v [M, Hkv, Dv]; `starts` [requests + 1]."""

    k: Tensor
    v: Tensor
    radii: PlacedRadii
    starts: list[int]

    def rows(
        self, rows: Sequence[MeteredRow], exact_k: Tensor | None, format_error: FormatError | None = None
    ) -> RowTokens:
        """What each row read. exact_k [SLOTS, Hkv, D] and format_error: by slot."""
        places = torch.arange(self.starts[-1], device=self.radii.slots.device)
        spans = [places[self.starts[row.request] : self.starts[row.request + 1]] for row in rows]
        seen = [span[: row.position + 1] for span, row in zip(spans, rows, strict=True)]
        kept = None if exact_k is None else exact_k[self.radii.slots]
        return RowTokens(seen, self.read, self.radii, kept, [self._knows(mine) for mine in seen], format_error)

    def read(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [S, Hkv, D] and values [S, Hkv, Dv] by place [S]."""
        return self.k.index_select(0, places), self.v.index_select(0, places)

    def _knows(self, places: Tensor) -> bool:
        """Whether what the engine read in all these places is known."""
        return self.radii.unknown is None or not bool(self.radii.unknown[places].any())


def gather(
    slots: Sequence[Tensor],
    inner: Radii,
    read: Callable[[Tensor], tuple[Tensor, Tensor]],
    own: AttentionCall | None,
    new_tokens: Sequence[int],
    others: Literal["exact", "unknown", "stored"] = "exact",
) -> Gathered:
    """What `slots[i]` [S_i] of each request i hold, in order of position; `read(slots)` gives k and v, copies.

    own: the new tokens of the pass that are read exactly: their slots are not written yet. None where all read what is
    stored. new_tokens: how many of each request's last tokens are new. others: what a request reads in slots that
    another one fills in this pass, since an engine may hand out a prefix in the very pass that computes it.
    """
    flat = torch.cat(list(slots))
    k, v = read(flat)
    starts = [0, *accumulate(mine.numel() for mine in slots)]
    if own is None:
        return Gathered(k, v, PlacedRadii(inner, flat), starts)
    order = own.slots.argsort()
    nearest = torch.searchsorted(own.slots[order], flat).clamp(max=own.slots.numel() - 1)
    place = order[nearest]
    exact, unknown = own.slots[place] == flat, None
    if others != "exact":
        lengths = zip([mine.numel() for mine in slots], new_tokens, strict=True)
        brought = torch.cat([torch.arange(length, device=flat.device) >= length - new for length, new in lengths])
        unknown = exact & ~brought if others == "unknown" else None
        exact = exact & brought
    k[exact], v[exact] = own.exact_k[place[exact]].to(k), own.exact_v[place[exact]].to(v)
    return Gathered(k, v, PlacedRadii(inner, flat, exact, unknown), starts)
