"""Merge the splits of each (row, head): output, base-2 lse, the sixteen accumulators, and the layer's
counter.

Splits are taken in blocks of 16 in order of position, whatever the batch, so a row alone and in a batch agree
bitwise. The heaviest token overall is the heaviest of its split; the other splits' heaviest join the rest.
"""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# mypy: disable-error-code="assignment,index"
from __future__ import annotations

import triton
import triton.language as tl

from witcert_core.kernels.device.paged import left_out, request_span
from witcert_core.kernels.device.running_sums import growth
from witcert_core.kernels.host import slack

_FIELDS = tl.constexpr(slack.META_FIELDS)
_UP = tl.constexpr(slack.SUM_UP)
_SINK_RADIUS = tl.constexpr(slack.SOFTMAX)
_LOST = tl.constexpr(slack.LOST_WEIGHT)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def log1p_up(x):
    """``log(1 + x)`` for ``x >= 0``, rounded up."""
    series = x * (1.0 - x * (0.5 - x * (1.0 / 3.0)))
    return tl.where(x < 0.015625, series, tl.log(1.0 + x)) * (1.0 + 2.0**-15)


@triton.jit
def growth_of(c):
    """``growth`` of one number."""
    return tl.max(growth(tl.zeros((2,), tl.float32) + c), 0)


@triton.jit
def split_factor(ref, top):
    """``2^(ref - top)`` of each split, 0 for one that saw nothing; exact, both being integers."""
    return tl.where(ref == float("-inf"), 0.0, tl.exp2(ref - top))


@triton.jit
def merge_splits(
    part_o_ptr,
    part_m_ptr,
    out_ptr,
    lse_ptr,
    acc_ptr,
    omega_ptr,
    sink_ptr,
    indptr_ptr,
    last_len_ptr,
    request_ptr,
    position_ptr,
    limit_ptr,
    target_ptr,
    tail_len_ptr,
    flag_ptr,
    counter_ptr,
    stride_out_row,
    stride_out_head,
    v_scale,
    window_left,
    q_len,
    num_splits,
    num_qo_heads,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    METER: tl.constexpr,
    SINK: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    FLAG: tl.constexpr,
    STORE_OUT: tl.constexpr,
    OMEGA: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Grid ``(rows, Hq)``.

    With ``ROWS`` a row sees ``limit_ptr[row]`` paged tokens; with ``TAIL`` it has ``tail_len_ptr[row]`` more
    outside its pages (the new keys of an extend step), in splits after the paged ones, and its output and lse
    go to row ``target_ptr[row]``. A row that sees nothing gets output 0, lse -inf and infinite accumulators,
    and is not counted.
    """
    if left_out(flag_ptr, FLAG):
        return
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    request = row // q_len
    if ROWS:
        request = tl.load(request_ptr + row).to(tl.int64)
    _, length = request_span(indptr_ptr, last_len_ptr, request, PAGE)
    position = (length - q_len + row % q_len).to(tl.int32)
    limit = position + 1
    target = row
    tail = 0
    if ROWS:
        position = tl.load(position_ptr + row)
        limit = tl.minimum(tl.load(limit_ptr + row), length)
    if TAIL:
        tail = tl.load(tail_len_ptr + row)
        target = tl.load(target_ptr + row).to(tl.int64)
    paged = (tl.maximum(limit, 0) + SPLIT - 1) // SPLIT
    start = 0
    if WINDOW:
        start = tl.minimum(tl.maximum(position - window_left, 0) // SPLIT, paged)
    stop = paged + (tail + SPLIT - 1) // SPLIT
    cell = row * num_qo_heads + head
    meta = part_m_ptr + cell * num_splits * _FIELDS

    block = tl.arange(0, BLOCK)
    top = float("-inf")
    heaviest = -1.0
    heaviest_split = 0
    for at in range(start, stop, BLOCK):
        split = at + block
        used = split < stop
        ref = tl.load(meta + split * _FIELDS, mask=used, other=float("-inf"))
        top = tl.maximum(top, tl.max(ref, 0))
    if SINK:
        sink2 = tl.load(sink_ptr + head).to(tl.float32) * _LOG2E
        top = tl.maximum(top, tl.ceil(sink2))
    base = tl.where(top == float("-inf"), 0.0, top)

    channel = tl.arange(0, DV_PAD)
    out = tl.zeros((DV_PAD,), tl.float32)
    mass = 0.0
    if SINK:
        sink_weight = tl.exp2(sink2 - base)
        mass += sink_weight
    if METER:
        for at in range(start, stop, BLOCK):
            split = at + block
            used = split < stop
            ref = tl.load(meta + split * _FIELDS, mask=used, other=float("-inf"))
            weight = tl.load(meta + split * _FIELDS + 2, mask=used, other=0.0) * split_factor(ref, base)
            # NaN reaches the sums; it must not reach the search for the maximum.
            weight = tl.where(weight == weight, weight, 0.0)
            best = tl.max(weight, 0)
            if best > heaviest:
                heaviest = best
                heaviest_split = at + tl.argmax(weight, 0)
    c_h = 0.0
    if METER and SINK:
        sink_is_h = sink_weight > heaviest
        heaviest = tl.where(sink_is_h, sink_weight, heaviest)
        heaviest_split = tl.where(sink_is_h, -1, heaviest_split)
        c_h = tl.where(sink_is_h, _SINK_RADIUS, 0.0)
        other_sink = tl.where(sink_is_h, 0.0, sink_weight)
    rest = 0.0
    eta_r = 0.0
    q_r = 0.0
    m_r = 0.0
    v2 = 0.0
    rho1 = 0.0
    rho2 = 0.0
    rho_max = 0.0
    rho_min = float("inf")
    v_max = 0.0
    omega = 0.0
    for at in range(start, stop, BLOCK):
        split = at + block
        used = split < stop
        slot = meta + split * _FIELDS
        ref = tl.load(slot, mask=used, other=float("-inf"))
        factor = split_factor(ref, base)
        used = used & (ref != float("-inf"))
        mass += tl.sum(tl.load(slot + 1, mask=used, other=0.0) * factor, 0)
        if STORE_OUT:
            o = tl.load(
                part_o_ptr + (cell * num_splits + split)[:, None] * DV + channel[None, :],
                mask=used[:, None] & (channel < DV)[None, :],
                other=0.0,
            )
            out += tl.sum(o * factor[:, None], 0)
        if OMEGA:
            omega = tl.maximum(omega, tl.max(tl.load(slot + 14, mask=used, other=0.0), 0))
        if METER:
            weight = tl.load(slot + 2, mask=used, other=0.0) * factor
            c = tl.load(slot + 3, mask=used, other=0.0)
            is_h = split == heaviest_split
            other_w = tl.where(is_h, 0.0, weight)
            other_c = tl.where(is_h, 0.0, c)
            g = growth(other_c)
            c_h += tl.sum(tl.where(is_h, c, 0.0), 0)
            rest += tl.sum(tl.load(slot + 4, mask=used, other=0.0) * factor + other_w, 0)
            eta_r += tl.sum(tl.load(slot + 5, mask=used, other=0.0) * factor + other_w * g, 0)
            square = other_w * g * tl.where(g > 2.4e17, 2.4e17, g)
            q_r += tl.sum(tl.load(slot + 6, mask=used, other=0.0) * factor + square, 0)
            big = tl.load(slot + 7, mask=used, other=0.0)
            m_r = tl.maximum(m_r, tl.max(tl.where(other_c > big, other_c, big), 0))
            v2 += tl.sum(tl.load(slot + 8, mask=used, other=0.0) * factor, 0)
            rho1 += tl.sum(tl.load(slot + 9, mask=used, other=0.0) * factor, 0)
            rho2 += tl.sum(tl.load(slot + 10, mask=used, other=0.0) * factor, 0)
            rho_max = tl.maximum(rho_max, tl.max(tl.load(slot + 11, mask=used, other=0.0), 0))
            rho_min = tl.minimum(rho_min, tl.min(tl.load(slot + 12, mask=used, other=float("inf")), 0))
            v_max = tl.maximum(v_max, tl.max(tl.load(slot + 13, mask=used, other=0.0), 0))

    blind = top == float("-inf")
    inverse = 1.0 / tl.where(blind, 1.0, mass)
    if STORE_OUT:
        value = out * inverse * v_scale
        tl.store(
            out_ptr + target * stride_out_row + head * stride_out_head + channel,
            value.to(out_ptr.dtype.element_ty),
            mask=channel < DV,
        )
    lse = tl.where(blind, float("-inf"), base + tl.log2(mass))
    tl.store(lse_ptr + target * num_qo_heads + head, lse)
    if OMEGA:
        tl.store(omega_ptr + target * num_qo_heads + head, tl.where(blind, float("inf"), omega))
    if METER:
        h = tl.maximum(heaviest, 0.0)
        if SINK:
            g0 = growth_of(_SINK_RADIUS)
            rest += other_sink
            eta_r += other_sink * g0
            q_r += other_sink * g0 * g0
            m_r = tl.maximum(m_r, tl.where(sink_is_h, 0.0, _SINK_RADIUS))
            rho_min = 0.0
        lost = tl.maximum(limit + tail, 1).to(tl.float32) * _LOST
        g_lost = growth_of(m_r)
        g_lost2 = g_lost * tl.minimum(g_lost, 2.4e17)
        g_h = growth_of(c_h)
        single = m_r == 0.0
        lost = tl.where(single, 0.0, lost)
        mass_r = rest * inverse * _UP + lost
        eta_r = eta_r * inverse * _UP + lost * g_lost
        q_r = q_r * inverse * _UP + lost * g_lost2
        p_h = h * inverse
        eta = eta_r + p_h * g_h * _UP
        q = q_r + p_h * g_h * tl.minimum(g_h, 2.4e17) * _UP
        m = tl.maximum(m_r, c_h)
        scale = tl.abs(v_scale)
        total = mass_r + eta_r + q_r + p_h + g_h + m
        wrong = blind | (total != total)
        inf = float("inf")
        v2 = v2 * inverse * _UP * scale * scale
        rho1 = rho1 * inverse * _UP * scale
        rho2 = rho2 * inverse * _UP * scale * scale
        v_sum = v2 + rho1 + rho2 + v_max + rho_max
        v_wrong = wrong | (v_sum != v_sum) | (rho_max == inf) | (v_max == inf)
        log_a = tl.minimum(log1p_up(eta), m)
        acc = acc_ptr + cell * 16
        tl.store(acc, tl.where(wrong, inf, eta))
        tl.store(acc + 1, tl.where(wrong, inf, q))
        tl.store(acc + 2, tl.where(wrong, inf, m))
        tl.store(acc + 3, tl.where(wrong, inf, p_h * (1.0 - 2.0**-12)))
        tl.store(acc + 4, tl.where(wrong, inf, c_h))
        tl.store(acc + 5, tl.where(wrong, inf, eta_r))
        tl.store(acc + 6, tl.where(wrong, inf, q_r))
        tl.store(acc + 7, tl.where(wrong, inf, m_r))
        tl.store(acc + 8, tl.where(wrong, inf, mass_r))
        tl.store(acc + 9, tl.where(wrong, inf, tl.where(log_a != log_a, m, log_a)))
        tl.store(acc + 10, tl.where(v_wrong, inf, v2))
        tl.store(acc + 11, tl.where(v_wrong, inf, rho1))
        tl.store(acc + 12, tl.where(v_wrong, inf, rho2))
        tl.store(acc + 13, tl.where(v_wrong, inf, rho_max * scale * _UP))
        tl.store(acc + 14, tl.where(v_wrong, inf, rho_min * scale * (1.0 - 2.0**-12)))
        tl.store(acc + 15, tl.where(v_wrong, inf, v_max * scale * _UP))
        if not blind:
            tl.atomic_add(counter_ptr, 1)
