"""One tile of packed tokens: logits against the queries, values and scales, whatever the page is made of.

Shapes: N tokens and M (query row, head) pairs of a tile, NG groups of 32 K channels, GV (a power of two) of V.
"""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# mypy: disable-error-code="assignment,index"
# Triton has no starred tuples, and a compile-time and a run-time test cannot share one condition.
# ruff: noqa: RUF005, SIM102

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from witcert_core.kernels.device.columns import narrow, widen
from witcert_core.kernels.device.digits import digit_product, query_digits
from witcert_core.kernels.device.dither_terms import row_terms, tile_terms
from witcert_core.kernels.device.exact_tile import exact_keys
from witcert_core.kernels.device.paged import locate
from witcert_core.kernels.device.running_sums import squares
from witcert_core.kernels.device.tiles import load_groups, load_queries, load_scale_tile, load_scales, load_values


class Cache(NamedTuple):
    """Pointers of one KV head of a packed cache, and the strides of its codes; no Python object on the device."""

    k: tl.tensor
    k_page: tl.tensor
    k_tok: tl.tensor
    v: tl.tensor
    v_page: tl.tensor
    v_tok: tl.tensor
    k_scales: tl.tensor
    v_scales: tl.tensor
    pass_ids: tl.tensor
    indices: tl.tensor
    exact_index: tl.tensor
    k_exact: tl.tensor
    v_exact: tl.tensor
    keep: tl.tensor
    channels: tl.tensor
    k_bypass: tl.tensor
    kv_head: tl.tensor
    num_kv_heads: tl.tensor
    global_head: tl.tensor


class Queries(NamedTuple):
    """What :func:`packed_tile` multiplies codes with.

    Tuples by group: ``parts`` (``[32, M]``, or their digits), their ``units [M]``, the terms ``kappa [M]`` of the
    dither row ``leader``; ``bypass [BP, M]``; ``base [M]`` pointers and ``valid [M]``, for rows drawn on the way.
    """

    parts: tl.tensor
    units: tl.tensor
    kappa: tl.tensor
    leader: tl.tensor
    bypass: tl.tensor
    base: tl.tensor
    valid: tl.tensor


class Tile(NamedTuple):
    """What :func:`packed_tile` returns.

    ``z [N, M]`` without the softmax scale; codes ``v [N, GV, 32]``, read from ``v_at [N]``; scales, 0 where exact or
    none: ``k_step`` (tuple of ``[N]``), ``v_step [N, GV]``; ``line [N]`` of the side tensors; tokens ``unknown [N]``:
    never written, or without a scale; ``v_unknown [N, GV]`` groups; ``exact [N]`` tokens and their ``exact_line`` in
    the side pool; squared norms ``[N]`` of exact keys and bypassed channels.
    """

    z: tl.tensor
    v: tl.tensor
    v_at: tl.tensor
    k_step: tl.tensor
    v_step: tl.tensor
    line: tl.tensor
    unknown: tl.tensor
    v_unknown: tl.tensor
    exact: tl.tensor
    exact_line: tl.tensor
    exact_square: tl.tensor
    bypass_square: tl.tensor


@triton.jit
def packed_queries(
    cache,
    q_base,
    valid,
    page0,
    begin,
    seed,
    layer,
    D: tl.constexpr,
    NG: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,
    BYPASS: tl.constexpr,
    BP: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """:class:`Queries` whose leader is the dither row of token ``begin``; the queries' groups ``[32, M]``; and what
    their digits have lost of each, ``[M]`` (:mod:`digits`)."""
    q = load_queries(q_base, valid, cache.keep, D, NG, BYPASS > 0)
    q_bypass = q[0]
    if BYPASS > 0:
        column = tl.arange(0, BP)
        channel = tl.load(cache.channels + column, mask=column < BYPASS, other=0)
        q_bypass = tl.load(
            q_base[None, :] + channel[:, None], mask=(column < BYPASS)[:, None] & valid[None, :], other=0.0
        )
    first_page = tl.load(cache.indices + page0 + begin // PAGE).to(tl.int64)
    leader = tl.load(cache.pass_ids + first_page * PAGE + begin % PAGE)
    kappa = row_terms(q_base, valid, cache.keep, seed, leader, layer, cache.global_head, M, D, NG, BYPASS > 0)
    parts = q
    units = kappa
    lost = kappa
    if DIGITS:
        parts, units, lost = query_digits(q, NG, M)
    return Queries(parts, units, kappa, leader, q_bypass, q_base, valid), q, lost


@triton.jit
def packed_tile(
    cache,
    queries,
    token,
    live,
    page0,
    seed,
    layer,
    D: tl.constexpr,
    NG: tl.constexpr,
    DV: tl.constexpr,
    NV: tl.constexpr,
    GV: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    MIXED: tl.constexpr,
    BYPASS: tl.constexpr,
    BP: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """Tokens ``token [N]`` (``live`` ones) of a request whose page indices start at ``page0``: a :class:`Tile`.

    Codes are exact in 16 bit, or meet ``DIGITS`` of the query as they are, so ``<q_g, code_g>`` goes through tensor
    cores and only the scales are applied in fp32: ``z = sum_g s_g (<q_g, code_g> - <q_g, u_g>)``. Where every token
    has the dither row ``leader``, ``kappa`` holds ``<q_g, u_g>``; elsewhere the rows are drawn. Tokens of repaired
    pages (``MIXED``) have steps of 0 here; their exact keys are added to ``z``, and their values are the caller's to
    add (:func:`add_exact_values`). A tile without one reads nothing of the side pool.
    """
    page, offset = locate(cache.indices, page0, token, live, PAGE)
    slot = page * PAGE + offset
    line = slot * cache.num_kv_heads + cache.kv_head
    pass_id = tl.load(cache.pass_ids + slot, mask=live, other=0)
    k = load_groups(cache.k + page * cache.k_page + offset * cache.k_tok, live, D, NG)
    v_at = cache.v + page * cache.v_page + offset * cache.v_tok
    v = load_values(v_at, live, DV, GV)
    k_step, unknown = load_scales(cache.k_scales, line, live, NG)
    v_step, v_unknown = load_scale_tile(cache.v_scales, line, live, NV, GV)
    exact_square = tl.zeros((N,), tl.float32)
    bypass_square = tl.zeros((N,), tl.float32)

    packed = live
    exact = live & False
    exact_line = line
    if MIXED:
        entry = tl.load(cache.exact_index + page * cache.num_kv_heads + cache.kv_head, mask=live, other=-1)
        exact = entry >= 0
        packed = live & (entry < 0)
        exact_line = entry.to(tl.int64) * PAGE + offset
        v_step = tl.where(exact[:, None], 0.0, v_step)
        v_unknown = v_unknown & ~exact[:, None]
    undithered = tl.zeros((N, M), tl.float32)
    shared = tl.max((packed & (pass_id != queries.leader)).to(tl.int32), 0) == 0
    if shared == 0:
        half = cache.k_scales.to(tl.pointer_type(tl.float16)) + line * NG
        undithered = tile_terms(
            queries.base,
            queries.valid,
            cache.keep,
            half,
            pass_id,
            packed,
            seed,
            layer,
            cache.global_head,
            N,
            M,
            D,
            BYPASS > 0,
        )
    z = tl.zeros((N, M), tl.float32)
    steps = ()
    for g in tl.static_range(NG):
        s = k_step[g]
        if MIXED:
            s = tl.where(exact, 0.0, s)
        steps = steps + (s,)
        if DIGITS:
            dot = digit_product(k[g], queries.parts[g], N, M) * queries.units[g][None, :]
        else:
            dot = tl.dot(k[g].to(queries.parts[g].dtype), queries.parts[g], input_precision="ieee")
        z += (dot - queries.kappa[g][None, :] * tl.where(shared, 1.0, 0.0)) * s[:, None]
    z -= undithered
    if BYPASS > 0:
        column = tl.arange(0, BP)
        keep = packed[:, None] & (column < BYPASS)[None, :]
        spared = tl.load(cache.k_bypass + line[:, None] * BYPASS + column[None, :], mask=keep, other=0.0)
        z += narrow(tl.dot(spared, widen(queries.bypass, M), input_precision="ieee"), M)
        bypass_square = squares((spared,), N, 1)
    if MIXED:
        if tl.max(exact.to(tl.int32), 0) > 0:
            whole, exact_square = exact_keys(cache, queries.base, queries.valid, exact, exact_line, D, N, M)
            z += whole
    unknown = packed & (unknown | (pass_id == 0))
    v_unknown = v_unknown | (packed & (pass_id == 0))[:, None]
    return Tile(z, v, v_at, steps, v_step, line, unknown, v_unknown, exact, exact_line, exact_square, bypass_square)
