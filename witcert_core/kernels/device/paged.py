"""Device functions of paged addressing: which rows a program has, which tokens they see, where those lie."""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def left_out(flag_ptr, METER: tl.constexpr):
    """Whether this launch has nothing to do: with a flag, the metered form runs if it is set, the other if not."""
    if flag_ptr is None:
        return False
    elif METER:
        return tl.load(flag_ptr) == 0
    else:
        return tl.load(flag_ptr) != 0


@triton.jit
def request_span(pages, request, PAGE: tl.constexpr):
    """First entry of a request in the page indices, and its number of tokens."""
    page0 = tl.load(pages.indptr + request)
    count = tl.load(pages.indptr + request + 1) - page0
    return page0, tl.where(count > 0, (count - 1) * PAGE + tl.load(pages.last_page_len + request), 0)


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
def visible_span(tile, query, q_len, window_left, pages, rows, PAGE: tl.constexpr):
    """What the queries of a tile see: ``page0``, and ``[M]`` end and begin, and the last token any sees.

    With ``rows`` the tile is one row with its own request, position and number of paged tokens; otherwise
    request ``tile`` owns ``q_len`` rows at the end of its tokens.
    """
    request = tile
    if rows is not None:
        request = tl.load(rows.request + tile)
    page0, length = request_span(pages, request, PAGE)
    position = length - q_len + query
    limit = position + 1
    if rows is not None:
        position = tl.load(rows.position + tile) + query * 0
        length = tl.minimum(length, tl.load(rows.limit + tile))
        limit = length + query * 0
    first = position * 0
    if window_left is not None:
        first = tl.maximum(position - window_left, 0)
    return page0, limit, first, length


@triton.jit
def locate(indices_ptr, page0, token, live, PAGE: tl.constexpr):
    """Page (int64) and offset of each token."""
    # Unsigned: no token lies before the first, and a signed division costs three instructions for one.
    place = token.to(tl.uint32)
    page = tl.load(indices_ptr + page0 + (place // PAGE).to(tl.int32), mask=live, other=0).to(tl.int64)
    return page, (place % PAGE).to(tl.int32)
