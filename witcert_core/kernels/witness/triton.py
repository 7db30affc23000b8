"""Encode the band norms of what tokens lost, from their exact and stored keys or values."""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# mypy: disable-error-code="assignment,index"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def encode_up(square, largest):
    """uint8 code of ``sqrt(square)`` rounded up; ``largest`` tells 0 from a square that underflowed.

    ``2^-12`` of an octave covers fp32: the sum of squares (2^-16 relative) and the logarithm (2^-21 absolute). Norms
    whose square overflows, from 2^64 on, are unknown here.
    """
    octaves = 0.5 * tl.log2(tl.where(square > 0.0, square, 1.0)) + 2.0**-12
    step = tl.ceil(8.0 * octaves + 160.0)
    step = tl.where(step > 238.0, tl.ceil(238.0 + (octaves - 9.75) * 0.5), step)
    step = tl.where(step > 246.0, tl.ceil(246.0 + (octaves - 25.75) * (1.0 / 12.75) + 2.0**-14), step)
    step = tl.where(square > 0.0, step, 1.0)
    step = tl.where(step < 1.0, 1.0, step)
    step = tl.where(largest == 0.0, 0.0, step)
    known = (square < float("inf")) & (step < 254.5)
    return tl.where(known, step, 255.0).to(tl.uint8)


@triton.jit
def record_witness_kernel(
    exact_ptr,
    stored_ptr,
    witness_ptr,
    slot_ptr,
    band_ptr,
    tokens,
    num_bands,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    N: tl.constexpr,
):
    """Grid ``(ceil(T / N), Hkv)``; one norm of each band, or of all channels where ``band_ptr`` is None (V)."""
    token = tl.program_id(0) * N + tl.arange(0, N)
    head = tl.program_id(1)
    channel = tl.arange(0, DP)
    live = token < tokens
    slot = tl.load(slot_ptr + token, mask=live, other=-1)
    live = live & (slot >= 0)
    slot = tl.where(live, slot, 0)
    keep = live[:, None] & (channel < D)[None, :]
    source = (token.to(tl.int64) * HKV + head)[:, None] * D + channel[None, :]
    exact = tl.load(exact_ptr + source, mask=keep, other=0.0).to(tl.float32)
    stored = tl.load(stored_ptr + source, mask=keep, other=0.0).to(tl.float32)
    gap = tl.abs(stored - exact)
    # Infinity stands for NaN, which a maximum could lose.
    gap = tl.where(gap == gap, gap, float("inf"))
    # The subtraction may round by half a unit.
    gap = gap * (1.0 + 2.0**-22)
    line = slot * HKV + head
    if band_ptr is None:
        tl.store(witness_ptr + line, encode_up(tl.sum(gap * gap, 1), tl.max(gap, 1)), mask=live)
    else:
        band = tl.load(band_ptr + channel, mask=channel < D, other=-1)
        for b in range(0, num_bands):
            part = tl.where((band == b)[None, :], gap, 0.0)
            code = encode_up(tl.sum(part * part, 1), tl.max(part, 1))
            tl.store(witness_ptr + line * num_bands + b, code, mask=live)
