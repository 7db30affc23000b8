"""Repair in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.kernels.repair.pages import RepairedPages


def repair_reference(
    repaired: RepairedPages, pages: Tensor, heads: Tensor, entries: Tensor, exact_k: Tensor, exact_v: Tensor
) -> None:
    """Copy ``n`` exact pages of one head each into the side pool and tag them; negative pages are skipped."""
    used = pages >= 0
    where = entries[used].to(torch.int64)
    repaired.k[where] = exact_k[used].to(repaired.k.dtype)
    repaired.v[where] = exact_v[used].to(repaired.v.dtype)
    repaired.index[pages[used].to(torch.int64), heads[used].to(torch.int64)] = entries[used]
