"""Fused quantize and write of K and V into INT8 pages."""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# mypy: disable-error-code="assignment,index"

from __future__ import annotations

import triton
import triton.language as tl

from witcert_core.kernels.device.dither_terms import dither_tile

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
    x_ptr,
    cache_ptr,
    scale_ptr,
    witness_ptr,
    row_id_ptr,
    head_id_ptr,
    slot_ptr,
    tokens,
    stride_x_tok,
    stride_x_head,
    stride_page,
    stride_tok,
    stride_head,
    layer,
    seed,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    DITHER: tl.constexpr,
    WITNESS: tl.constexpr,
    BYPASS: tl.constexpr,
    BP: tl.constexpr,
    keep_ptr,
    channel_ptr,
    bypass_ptr,
    first,
    head,
):
    """One KV head of ``N`` tokens from ``first``, K or V. ``BYPASS`` channels, listed in ``channel_ptr`` and 0 in
    ``keep_ptr``, are copied to ``bypass_ptr`` and left out of everything else."""
    NG: tl.constexpr = (D + 31) // 32
    token = first + tl.arange(0, N)
    live = token < tokens
    slot = tl.load(slot_ptr + token, mask=live, other=-1)
    live = live & (slot >= 0)
    slot = tl.where(live, slot, 0)
    page = slot // PAGE
    offset = slot % PAGE
    token64 = token.to(tl.int64)
    line = slot * HKV + head
    source = x_ptr + token64[:, None] * stride_x_tok + head * stride_x_head
    target = cache_ptr + page[:, None] * stride_page + offset[:, None] * stride_tok + head.to(tl.int64) * stride_head
    if BYPASS > 0:
        copy_bypass(source, channel_ptr + head * BYPASS, bypass_ptr, line, live, BYPASS, BP)
    for g in tl.static_range(NG):
        channel = g * 32 + tl.arange(0, 32)
        keep = live[:, None] & (channel < D)[None, :]
        coded = keep
        if BYPASS > 0:
            kept = tl.load(keep_ptr + head * D + channel, mask=channel < D, other=0)
            coded = keep & (kept != 0)[None, :]
        x = tl.load(source + channel[None, :], mask=coded, other=0.0).to(tl.float32)
        u = tl.zeros((N, 32), tl.float32)
        if DITHER:
            pass_id = tl.load(row_id_ptr + slot, mask=live, other=0)
            u = dither_tile(seed, pass_id, layer, tl.load(head_id_ptr + head), g, N)
            u = tl.where(coded, u, 0.0)
        codes, s, safe, usable = quantize_group(x, u)
        tl.store(target + channel[None, :], codes.to(tl.int8), mask=keep)
        tl.store(scale_ptr + line * NG + g, s.to(tl.float16), mask=live)
        if WITNESS:
            # In units of the step: s (code - u) - x = s (code - u - x / s), x / s rounded as above.
            ratio = tl.div_rn(tl.where(usable[:, None], x, 0.0), safe[:, None] + tl.zeros_like(x))
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
def copy_bypass(source, channel_ptr, bypass_ptr, line, live, BYPASS: tl.constexpr, BP: tl.constexpr):
    """The bypassed channels of ``N`` tokens at ``source [N, 1]``, bit for bit."""
    column = tl.arange(0, BP)
    channel = tl.load(channel_ptr + column, mask=column < BYPASS, other=0)
    keep = live[:, None] & (column < BYPASS)[None, :]
    spared = tl.load(source + channel[None, :], mask=keep, other=0.0)
    tl.store(bypass_ptr + line[:, None] * BYPASS + column[None, :], spared, mask=keep)


@triton.jit(do_not_specialize=["layer", "seed"])
def append_kernel(
    key_ptr,
    value_ptr,
    k_ptr,
    v_ptr,
    ks_ptr,
    vs_ptr,
    kw_ptr,
    row_id_ptr,
    head_id_ptr,
    slot_ptr,
    keep_ptr,
    channel_ptr,
    bypass_ptr,
    tokens,
    stride_key_tok,
    stride_key_head,
    stride_value_tok,
    stride_value_head,
    stride_k_page,
    stride_k_tok,
    stride_k_head,
    stride_v_page,
    stride_v_tok,
    stride_v_head,
    layer,
    seed,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    WITNESS: tl.constexpr,
    BYPASS: tl.constexpr,
    BP: tl.constexpr,
):
    """Grid ``(ceil(T / N), Hkv, 2)``: K and V are halves of one launch."""
    first = tl.program_id(0) * N
    head = tl.program_id(1)
    if tl.program_id(2) == 0:
        append_side(
            key_ptr,
            k_ptr,
            ks_ptr,
            kw_ptr,
            row_id_ptr,
            head_id_ptr,
            slot_ptr,
            tokens,
            stride_key_tok,
            stride_key_head,
            stride_k_page,
            stride_k_tok,
            stride_k_head,
            layer,
            seed,
            HKV,
            D,
            PAGE,
            N,
            True,
            WITNESS,
            BYPASS,
            BP,
            keep_ptr,
            channel_ptr,
            bypass_ptr,
            first,
            head,
        )
    else:
        append_side(
            value_ptr,
            v_ptr,
            vs_ptr,
            kw_ptr,
            row_id_ptr,
            head_id_ptr,
            slot_ptr,
            tokens,
            stride_value_tok,
            stride_value_head,
            stride_v_page,
            stride_v_tok,
            stride_v_head,
            layer,
            seed,
            HKV,
            DV,
            PAGE,
            N,
            False,
            False,
            0,
            BP,
            keep_ptr,
            channel_ptr,
            bypass_ptr,
            first,
            head,
        )
