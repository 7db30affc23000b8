"""Device functions of paged addressing: which rows a program has, which tokens they see, where those lie."""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def left_out(flag_ptr, FLAG: tl.constexpr):
    """Whether this launch has nothing to do. ``FLAG``: 0 always runs, 1 only with the flag set, 2 only without."""
    if FLAG == 0:
        return False
    if FLAG == 1:
        return tl.load(flag_ptr) == 0
    return tl.load(flag_ptr) != 0


@triton.jit
def request_span(indptr_ptr, last_len_ptr, request, PAGE: tl.constexpr):
    """First entry of a request in the page indices, and its number of tokens."""
    page0 = tl.load(indptr_ptr + request)
    pages = tl.load(indptr_ptr + request + 1) - page0
    return page0, tl.where(pages > 0, (pages - 1) * PAGE + tl.load(last_len_ptr + request), 0)


@triton.jit
def query_tile(q_len, kv_head, G: tl.constexpr, M: tl.constexpr):
    """The (query row, head) pairs of program ``tl.program_id(0)``, ``M`` of the ``q_len G`` of one request.

    Returns the request (or, where rows come one by one, the row), and ``[M]`` query index, validity, row, head.
    """
    m_tiles = (q_len * G + M - 1) // M
    tile = tl.program_id(0) // m_tiles
    pair = (tl.program_id(0) % m_tiles) * M + tl.arange(0, M)
    query = pair // G
    row = (tile * q_len + query).to(tl.int64)
    return tile, query, pair < q_len * G, row, kv_head * G + pair % G


@triton.jit
def visible_span(
    tile,
    query,
    q_len,
    window_left,
    indptr_ptr,
    last_len_ptr,
    request_ptr,
    position_ptr,
    limit_ptr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """What the queries of a tile see: ``page0``, and ``[M]`` position, end and begin, and the last token any sees.

    With ``ROWS`` the tile is one row with its own request, position and number of paged tokens; otherwise
    request ``tile`` owns ``q_len`` rows at the end of its tokens.
    """
    request = tile
    if ROWS:
        request = tl.load(request_ptr + tile)
    page0, length = request_span(indptr_ptr, last_len_ptr, request, PAGE)
    position = length - q_len + query
    limit = position + 1
    if ROWS:
        position = tl.load(position_ptr + tile) + query * 0
        length = tl.minimum(length, tl.load(limit_ptr + tile))
        limit = length + query * 0
    first = position * 0
    if WINDOW:
        first = tl.maximum(position - window_left, 0)
    return page0, position, limit, first, length


@triton.jit
def locate(indices_ptr, page0, token, live, PAGE: tl.constexpr):
    """Page (int64) and offset of each token."""
    # Unsigned: no token lies before the first, and a signed division costs three instructions for one.
    place = token.to(tl.uint32)
    page = tl.load(indices_ptr + page0 + (place // PAGE).to(tl.int32), mask=live, other=0).to(tl.int64)
    return page, (place % PAGE).to(tl.int32)
