"""Repair: exact pages beside the packed ones, read by the same decode kernel (``decode_int8(...,
repaired=...)``)."""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.kernels.host import dispatch
from witcert_core.kernels.host.backend import resolve
from witcert_core.kernels.repair.launch import repair_pages_op
from witcert_core.kernels.repair.pages import RepairedPages
from witcert_core.kernels.repair.reference import repair_reference


def repair_pages(
    repaired: RepairedPages,
    pages: Tensor,
    heads: Tensor,
    entries: Tensor,
    exact_k: Tensor,
    exact_v: Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Make ``n`` (page, KV head) pairs exact from now on.

    A page that is written again must be set back to packed: ``repaired.index[page] = -1``.

    Args:
        repaired: tags and side pool, changed in place.
        pages, heads, entries: int32 ``[n]``; negative pages are padding. Which entries are free is the
            caller's to know.
        exact_k, exact_v: ``[n, page_size, D]``, ``[n, page_size, Dv]`` in the side pool's dtype, contiguous.
    """
    count = pages.numel()
    for name, ids in (("pages", pages), ("heads", heads), ("entries", entries)):
        dispatch.check_vector(name, ids, count, torch.int32)
    for name, source, pool in (("exact_k", exact_k, repaired.k), ("exact_v", exact_v, repaired.v)):
        want = (count, *pool.shape[1:])
        if tuple(source.shape) != want or source.dtype != pool.dtype or not source.is_contiguous():
            raise InputError(
                f"{name} is {source.dtype} {tuple(source.shape)}; it must be contiguous {pool.dtype} {want}"
            )
    if resolve(backend, pages.device) == "reference":
        repair_reference(repaired, pages, heads, entries, exact_k, exact_v)
        return
    repair_pages_op(repaired.index, repaired.k, repaired.v, pages, heads, entries, exact_k, exact_v)


__all__ = ["RepairedPages", "repair_pages"]
