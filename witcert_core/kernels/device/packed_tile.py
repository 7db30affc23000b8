"""One tile of packed tokens: logits against the queries, values and scales, whatever the page is made of.

Shapes: N tokens and M (query row, head) pairs of a tile, NG groups of 32 K channels, GV (a power of two) of V.
"""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# mypy: disable-error-code="assignment,index"
# Triton has no starred tuples.

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from witcert_core.kernels.device.arguments import Bypass
from witcert_core.kernels.device.columns import narrow, widen
from witcert_core.kernels.device.digits import digit_product, query_digits
from witcert_core.kernels.device.dither_terms import Dither, shared_terms, tile_terms
from witcert_core.kernels.device.paged import locate
from witcert_core.kernels.device.running_sums import squares
from witcert_core.kernels.device.tiles import load_groups, load_queries, load_scale_tile, load_scales, load_values


class PackedHead(NamedTuple):
    """One KV head of packed pages: pointers to its codes with their strides, and what stands beside them.

    ``keep`` and ``bypass`` are None without bypassed channels; no Python object on the device.
    """

    k: tl.tensor
    k_page: tl.tensor
    k_token: tl.tensor
    v: tl.tensor
    v_page: tl.tensor
    v_token: tl.tensor
    k_scales: tl.tensor
    v_scales: tl.tensor
    pass_ids: tl.tensor
    indices: tl.tensor
    keep: tl.tensor
    bypass: tl.tensor
    dither: tl.tensor
    head: tl.tensor
    num_heads: tl.tensor


class Queries(NamedTuple):
    """What :func:`packed_tile` multiplies codes with.

    Tuples by group: ``parts`` (``[32, M]``, or their digits), their ``units [M]``, the terms ``kappa [M]`` of the
    dither of pass ``leader``; ``bypass [BP, M]``; ``base [M]`` pointers and ``valid [M]``, for dither drawn on the way.
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

    ``z [N, M]`` without the softmax scale; codes ``v [N, GV, 32]``, read from ``v_at [N]``; scales, 0 where they are
    none: ``k_step`` (tuple of ``[N]``), ``v_step [N, GV]``; ``line [N]`` of the side tensors; tokens ``unknown [N]``:
    never written, or without a scale; ``v_unknown [N, GV]`` groups; squared norms ``[N]`` of bypassed channels.
    """

    z: tl.tensor
    v: tl.tensor
    v_at: tl.tensor
    k_step: tl.tensor
    v_step: tl.tensor
    line: tl.tensor
    unknown: tl.tensor
    v_unknown: tl.tensor
    bypass_square: tl.tensor


@triton.jit
def packed_head(cache, indices_ptr, kv_head, num_kv_heads, seed, layer, SHAPE: tl.constexpr):
    """:class:`PackedHead` of :class:`~witcert_core.kernels.device.arguments.PackedPages`."""
    head64 = kv_head.to(tl.int64)
    keep = None
    bypass = None
    if cache.bypass is not None:
        keep = cache.bypass.keep + head64 * SHAPE.D
        bypass = Bypass(keep, cache.bypass.channels + head64 * SHAPE.BYPASS, cache.bypass.k)
    return PackedHead(
        cache.k.ptr + head64 * cache.k.head,
        cache.k.page,
        cache.k.token,
        cache.v.ptr + head64 * cache.v.head,
        cache.v.page,
        cache.v.token,
        cache.k_scales,
        cache.v_scales,
        cache.pass_ids,
        indices_ptr,
        keep,
        bypass,
        Dither(seed, layer, tl.load(cache.head_ids + kv_head)),
        kv_head,
        num_kv_heads,
    )


@triton.jit
def packed_queries(cache, q_base, valid, page0, begin, SHAPE: tl.constexpr):
    """:class:`Queries` whose leader wrote token ``begin``; the queries' groups ``[32, M]``; and what their digits have
    lost of each, ``[M]`` (:mod:`digits`)."""
    q = load_queries(q_base, valid, cache.keep, SHAPE.D)
    q_bypass = q[0]
    if cache.bypass is not None:
        column = tl.arange(0, SHAPE.BP)
        listed = column < SHAPE.BYPASS
        channel = tl.load(cache.bypass.channels + column, mask=listed, other=0)
        q_bypass = tl.load(q_base[None, :] + channel[:, None], mask=listed[:, None] & valid[None, :], other=0.0)
    first_page = tl.load(cache.indices + page0 + begin // SHAPE.PAGE).to(tl.int64)
    leader = tl.load(cache.pass_ids + first_page * SHAPE.PAGE + begin % SHAPE.PAGE)
    kappa = shared_terms(q_base, valid, cache.keep, cache.dither, leader, SHAPE)
    parts = q
    units = kappa
    lost = kappa
    if SHAPE.DIGITS:
        parts, units, lost = query_digits(q, SHAPE.NG, SHAPE.M)
    return Queries(parts, units, kappa, leader, q_bypass, q_base, valid), q, lost


@triton.jit
def packed_tile(cache, queries, token, page0, SHAPE: tl.constexpr):
    """Tokens ``token [N]``, all there, of a request whose page indices start at ``page0``: a :class:`Tile`.

    Codes are exact in 16 bit, or meet ``DIGITS`` of the query as they are, so ``<q_g, code_g>`` goes through tensor
    cores and only the scales are applied in fp32: ``z = sum_g s_g (<q_g, code_g> - <q_g, u_g>)``. Where every token
    is of pass ``leader``, ``kappa`` holds ``<q_g, u_g>``; elsewhere the dither is drawn.
    """
    live = tl.full((SHAPE.N,), True, tl.int1)
    page, offset = locate(cache.indices, page0, token, live, SHAPE.PAGE)
    slot = page * SHAPE.PAGE + offset
    line = slot * cache.num_heads + cache.head
    pass_id = tl.load(cache.pass_ids + slot, mask=live, other=0)
    k = load_groups(cache.k + page * cache.k_page + offset * cache.k_token, live, SHAPE.D)
    v_at = cache.v + page * cache.v_page + offset * cache.v_token
    v = load_values(v_at, live, SHAPE.DV, SHAPE.GV)
    k_step, unknown = load_scales(cache.k_scales, line, live, SHAPE.NG)
    v_step, v_unknown = load_scale_tile(cache.v_scales, line, live, SHAPE.NV, SHAPE.GV)
    bypass_square = tl.zeros((SHAPE.N,), tl.float32)

    undithered = tl.zeros((SHAPE.N, SHAPE.M), tl.float32)
    shared = tl.max((pass_id != queries.leader).to(tl.int32), 0) == 0
    if shared == 0:
        half = cache.k_scales.to(tl.pointer_type(tl.float16)) + line * SHAPE.NG
        undithered = tile_terms(queries.base, queries.valid, cache.keep, half, pass_id, live, cache.dither, SHAPE)
    z = tl.zeros((SHAPE.N, SHAPE.M), tl.float32)
    for g in tl.static_range(SHAPE.NG):
        if SHAPE.DIGITS:
            dot = digit_product(k[g], queries.parts[g], SHAPE.N, SHAPE.M) * queries.units[g][None, :]
        else:
            dot = tl.dot(k[g].to(queries.parts[g].dtype), queries.parts[g], input_precision="ieee")
        z += (dot - queries.kappa[g][None, :] * tl.where(shared, 1.0, 0.0)) * k_step[g][:, None]
    z -= undithered
    if cache.bypass is not None:
        column = tl.arange(0, SHAPE.BP)
        keep = live[:, None] & (column < SHAPE.BYPASS)[None, :]
        spared = tl.load(cache.bypass.k + line[:, None] * SHAPE.BYPASS + column[None, :], mask=keep, other=0.0)
        z += narrow(tl.dot(spared, widen(queries.bypass, SHAPE.M), input_precision="ieee"), SHAPE.M)
        bypass_square = squares((spared,), SHAPE.N, 1)
    unknown = unknown | (pass_id == 0)
    v_unknown = v_unknown | (pass_id == 0)[:, None]
    return Tile(z, v, v_at, k_step, v_step, line, unknown, v_unknown, bypass_square)
