"""Fused quantize and write of K and V into INT8 pages."""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# mypy: disable-error-code="assignment,index"

from __future__ import annotations

import triton
import triton.language as tl

from witcert_core.kernels.device.dither_terms import Dither, dither_tile

_WITNESS_UNIT = tl.constexpr(32.0**0.5 / 510.0)


@triton.jit
def round_even(x):
    """Nearest integer of ``|x| < 2^22``, ties to even: adding ``1.5 * 2^23`` leaves no fraction bits."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def half_above(wanted, amax):
    """Smallest fp16 ``s`` with ``127 s >= amax`` given ``wanted ~ amax / 127``; +inf beyond fp16 or for NaN.

    ``127 s`` has 18 bits and is exact in fp32. Near is right or one step short, so one step up is enough.
    """
    near = wanted.to(tl.float16)
    bits = near.to(tl.int16, bitcast=True)
    up = (bits + 1).to(tl.float16, bitcast=True)
    down = tl.where(bits > 0, bits - 1, bits).to(tl.float16, bitcast=True)
    s = tl.where(near.to(tl.float32) * 127.0 >= amax, near, up)
    s = tl.where((near.to(tl.float32) * 127.0 >= amax) & (down.to(tl.float32) * 127.0 >= amax), down, s)
    return tl.where(amax <= 8319008.0, s.to(tl.float32), float("inf"))


@triton.jit
def quantize_group(x, u):
    """Codes fp32 ``[N, 32]`` and scale fp32 ``[N]`` of one group; codes 0 where the scale is 0 or
    infinite."""
    spoilt = tl.max(tl.where((x != x) | (tl.abs(x) == float("inf")), 1, 0), 1) > 0
    amax = tl.max(tl.where(x == x, tl.abs(x), 0.0), 1)
    amax = tl.where(spoilt, float("inf"), amax)
    wanted = tl.div_rn(tl.where(spoilt, 0.0, amax), 127.0 + tl.zeros_like(amax))
    s = half_above(wanted, amax)
    usable = (s > 0.0) & (s < float("inf"))
    safe = tl.where(usable, s, 1.0)
    steps = tl.div_rn(tl.where(usable[:, None], x, 0.0), safe[:, None] + tl.zeros_like(x)) + u
    codes = tl.where(usable[:, None], round_even(steps), 0.0)
    return codes, s, safe, usable


@triton.jit
def append_side(
    x,
    pool,
    scale_ptr,
    witness_ptr,
    slot_ptr,
    tokens,
    bypass,
    pass_id_ptr,
    dither,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    BYPASS: tl.constexpr,
    BP: tl.constexpr,
):
    """One KV head of ``N`` tokens, K or V (which has no ``dither``). The channels of ``bypass``, ``BYPASS`` of a head,
    are copied to it and left out of everything else."""
    NG: tl.constexpr = (D + 31) // 32
    head = tl.program_id(1)
    token = tl.program_id(0) * N + tl.arange(0, N)
    live = token < tokens
    slot = tl.load(slot_ptr + token, mask=live, other=-1)
    live = live & (slot >= 0)
    slot = tl.where(live, slot, 0)
    line = slot * HKV + head
    source = x.ptr + token.to(tl.int64)[:, None] * x.row + head * x.head
    place = slot // PAGE * pool.page + slot % PAGE * pool.token
    target = pool.ptr + place[:, None] + head.to(tl.int64) * pool.head
    if bypass is not None:
        copy_bypass(source, bypass, head, line, live, BYPASS, BP)
    for g in tl.static_range(NG):
        channel = g * 32 + tl.arange(0, 32)
        keep = live[:, None] & (channel < D)[None, :]
        coded = keep
        if bypass is not None:
            kept = tl.load(bypass.keep + head * D + channel, mask=channel < D, other=0)
            coded = keep & (kept != 0)[None, :]
        value = tl.load(source + channel[None, :], mask=coded, other=0.0).to(tl.float32)
        u = tl.zeros((N, 32), tl.float32)
        if dither is not None:
            u = dither_tile(dither, tl.load(pass_id_ptr + slot, mask=live, other=0), g, N)
            u = tl.where(coded, u, 0.0)
        codes, s, safe, usable = quantize_group(value, u)
        tl.store(target + channel[None, :], codes.to(tl.int8), mask=keep)
        tl.store(scale_ptr + line * NG + g, s.to(tl.float16), mask=live)
        if witness_ptr is not None:
            # In units of the step: s (code - u) - x = s (code - u - x / s), x / s rounded as above.
            ratio = tl.div_rn(tl.where(usable[:, None], value, 0.0), safe[:, None] + tl.zeros_like(value))
            gap = codes - u - ratio
            # 2^-17 for the rounding of x / s (127 * 2^-24) and of the two subtractions in each channel.
            gap = tl.where(coded & usable[:, None], tl.abs(gap) + 7.62939453125e-06, 0.0)
            norm = tl.sqrt(tl.sum(gap * gap, 1)) * (1.0 + 2.0**-20)
            code = tl.ceil(norm / _WITNESS_UNIT * (1.0 + 2.0**-20))
            # A full half step in every channel may round just past 255; the decoder's 2^-15 margin covers it.
            code = tl.where(code > 255.0, 255.0, code)
            code = tl.where(usable, code, tl.where(s == 0.0, 0.0, 255.0))
            tl.store(witness_ptr + line * NG + g, code.to(tl.uint8), mask=live)


@triton.jit
def copy_bypass(source, bypass, head, line, live, BYPASS: tl.constexpr, BP: tl.constexpr):
    """The bypassed channels of ``N`` tokens at ``source [N, 1]``, bit for bit."""
    column = tl.arange(0, BP)
    channel = tl.load(bypass.channels + head * BYPASS + column, mask=column < BYPASS, other=0)
    keep = live[:, None] & (column < BYPASS)[None, :]
    spared = tl.load(source + channel[None, :], mask=keep, other=0.0)
    tl.store(bypass.k + line[:, None] * BYPASS + column[None, :], spared, mask=keep)


@triton.jit(do_not_specialize=["layer", "seed"])
def append_kernel(
    key,
    value,
    cache,
    slot_ptr,
    tokens,
    layer,
    seed,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    BYPASS: tl.constexpr,
    BP: tl.constexpr,
):
    """Grid ``(ceil(T / N), Hkv, 2)``: K and V are halves of one launch.

    ``key``, ``value``: :class:`Heads`; ``cache``: :class:`PackedPages`, its scales and witness as they are stored.
    """
    if tl.program_id(2) == 0:
        dither = Dither(seed, layer, tl.load(cache.head_ids + tl.program_id(1)))
        append_side(
            key,
            cache.k,
            cache.k_scales,
            cache.witness,
            slot_ptr,
            tokens,
            cache.bypass,
            cache.pass_ids,
            dither,
            HKV,
            D,
            PAGE,
            N,
            BYPASS,
            BP,
        )
    else:
        append_side(
            value, cache.v, cache.v_scales, None, slot_ptr, tokens, None, None, None, HKV, DV, PAGE, N, BYPASS, BP
        )
