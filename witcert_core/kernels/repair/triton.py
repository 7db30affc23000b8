"""Scatter exact pages into the side pool and tag them."""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def repair_kernel(
    page_ptr,
    head_ptr,
    entry_ptr,
    source_ptr,
    pool_ptr,
    index_ptr,
    num_kv_heads,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TAG: tl.constexpr,
):
    """Grid ``(n, ceil(SIZE / BLOCK))``, ``SIZE`` numbers a page of one head."""
    item = tl.program_id(0)
    page = tl.load(page_ptr + item)
    if page < 0:
        return
    entry = tl.load(entry_ptr + item)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source_ptr + item.to(tl.int64) * SIZE + at, mask=at < SIZE)
    tl.store(pool_ptr + entry.to(tl.int64) * SIZE + at, value, mask=at < SIZE)
    if TAG:
        tl.store(index_ptr + page.to(tl.int64) * num_kv_heads + tl.load(head_ptr + item), entry)
