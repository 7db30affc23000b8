"""Merge the splits of each (row, head): output, base-2 lse, the sixteen accumulators, and the layer's
counter.

Splits are taken in blocks of 16 in order of position, whatever the batch, so a row alone and in a batch agree
bitwise. The heaviest token overall is the heaviest of its split; the other splits' heaviest join the rest.
"""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# mypy: disable-error-code="assignment,index"
# A compile-time and a run-time test cannot share one condition.
# ruff: noqa: SIM102

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from witcert_core.kernels.device.paged import left_out, request_span
from witcert_core.kernels.device.running_sums import capped, growth
from witcert_core.kernels.host import slack

_FIELDS = tl.constexpr(slack.META_FIELDS)
_SPLIT = tl.constexpr(slack.SPLIT_TOKENS)
_BLOCK = tl.constexpr(16)
_UP = tl.constexpr(slack.SUM_UP)
_DOWN = tl.constexpr(1.0 - 2.0**-12)
_SINK_RADIUS = tl.constexpr(slack.SOFTMAX)
_LOST = tl.constexpr(slack.LOST_WEIGHT)
_LOG2E = tl.constexpr(1.4426950408889634)


class Splits(NamedTuple):
    """Where the splits of one row and head lie: fields at ``meta``, those from ``start`` to ``stop`` to be merged;
    ``base``: the exponent that all of them are brought to; ``sink``: its weight, 0 without one."""

    meta: tl.tensor
    start: tl.tensor
    stop: tl.tensor
    base: tl.tensor
    sink: tl.tensor


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
def factors(splits, at):
    """Fields of a block of splits from ``at``, whether each is merged, and ``2^(ref - base)``, 0 for one that saw
    nothing; exact, both being integers."""
    split = at + tl.arange(0, _BLOCK)
    field = splits.meta + split * _FIELDS
    ref = tl.load(field, mask=split < splits.stop, other=float("-inf"))
    factor = tl.where(ref == float("-inf"), 0.0, tl.exp2(ref - splits.base))
    return field, (split < splits.stop) & (ref != float("-inf")), factor


@triton.jit
def total(field, used, factor):
    """A field's sum over a block of splits."""
    return tl.sum(tl.load(field, mask=used, other=0.0) * factor, 0)


@triton.jit
def largest(field, used):
    """A field's maximum over a block of splits; 0 if none is merged."""
    return tl.max(tl.load(field, mask=used, other=0.0), 0)


@triton.jit
def merged_output(splits, part_o_ptr, channel, DV: tl.constexpr):
    """Mass of a row, and output times mass at ``channel [C]``; 0 without ``part_o_ptr``."""
    mass = splits.sink
    out = tl.zeros_like(channel).to(tl.float32)
    for at in range(splits.start, splits.stop, _BLOCK):
        field, used, factor = factors(splits, at)
        mass += total(field + 1, used, factor)
        if part_o_ptr is not None:
            place = part_o_ptr + (at + tl.arange(0, _BLOCK))[:, None] * DV + channel[None, :]
            o = tl.load(place, mask=used[:, None] & (channel < DV)[None, :], other=0.0)
            out += tl.sum(o * factor[:, None], 0)
    return mass, out


@triton.jit
def heaviest_of(splits):
    """Weight of the heaviest token, and the split it is of: -1 and 0 where there is none."""
    heaviest = -1.0
    heaviest_split = 0
    for at in range(splits.start, splits.stop, _BLOCK):
        field, used, factor = factors(splits, at)
        weight = tl.load(field + 2, mask=used, other=0.0) * factor
        # NaN reaches the sums; it must not reach the search for the maximum.
        weight = tl.where(weight == weight, weight, 0.0)
        best = tl.max(weight, 0)
        if best > heaviest:
            heaviest = best
            heaviest_split = at + tl.argmax(weight, 0)
    return heaviest, heaviest_split


@triton.jit
def merge_meter(splits, acc, inverse, blind, seen, SINK: tl.constexpr):
    """The sixteen accumulators at ``acc``, of weights whose mass has the ``inverse``; infinite for a ``blind`` row.

    ``seen``: how many tokens the row sees, each of which may have lost a weight that underflowed.
    """
    heaviest, heaviest_split = heaviest_of(splits)
    c_h = 0.0
    if SINK:
        sink_is_h = splits.sink > heaviest
        heaviest = tl.where(sink_is_h, splits.sink, heaviest)
        heaviest_split = tl.where(sink_is_h, -1, heaviest_split)
        c_h = tl.where(sink_is_h, _SINK_RADIUS, 0.0)
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
    for at in range(splits.start, splits.stop, _BLOCK):
        field, used, factor = factors(splits, at)
        weight = tl.load(field + 2, mask=used, other=0.0) * factor
        c = tl.load(field + 3, mask=used, other=0.0)
        is_h = at + tl.arange(0, _BLOCK) == heaviest_split
        other_w = tl.where(is_h, 0.0, weight)
        other_c = tl.where(is_h, 0.0, c)
        g = growth(other_c)
        c_h += tl.sum(tl.where(is_h, c, 0.0), 0)
        rest += tl.sum(tl.load(field + 4, mask=used, other=0.0) * factor + other_w, 0)
        eta_r += tl.sum(tl.load(field + 5, mask=used, other=0.0) * factor + other_w * g, 0)
        q_r += tl.sum(tl.load(field + 6, mask=used, other=0.0) * factor + other_w * g * capped(g), 0)
        big = tl.load(field + 7, mask=used, other=0.0)
        m_r = tl.maximum(m_r, tl.max(tl.where(other_c > big, other_c, big), 0))
        v2 += total(field + 8, used, factor)
        rho1 += total(field + 9, used, factor)
        rho2 += total(field + 10, used, factor)
        rho_max = tl.maximum(rho_max, largest(field + 11, used))
        rho_min = tl.minimum(rho_min, tl.min(tl.load(field + 12, mask=used, other=float("inf")), 0))
        v_max = tl.maximum(v_max, largest(field + 13, used))
    if SINK:
        sink = tl.where(sink_is_h, 0.0, splits.sink)
        g_sink = growth_of(_SINK_RADIUS)
        rest += sink
        eta_r += sink * g_sink
        q_r += sink * g_sink * g_sink
        m_r = tl.maximum(m_r, tl.where(sink_is_h, 0.0, _SINK_RADIUS))
        rho_min = 0.0

    lost_at_all = tl.maximum(seen, 1).to(tl.float32) * _LOST
    lost = tl.where(m_r == 0.0, 0.0, lost_at_all)
    g_lost = growth_of(m_r)
    g_h = growth_of(c_h)
    p_h = tl.maximum(heaviest, 0.0) * inverse
    mass_r = rest * inverse * _UP + lost
    eta_r = eta_r * inverse * _UP + lost * g_lost
    q_r = q_r * inverse * _UP + lost * (g_lost * capped(g_lost))
    eta = eta_r + p_h * g_h * _UP
    q = q_r + p_h * g_h * capped(g_h) * _UP
    m = tl.maximum(m_r, c_h)
    log_a = tl.minimum(log1p_up(eta), m)
    log_a = tl.where(log_a != log_a, m, log_a)
    v2 = v2 * inverse * _UP + lost_at_all * v_max * v_max
    rho1 = rho1 * inverse * _UP + lost_at_all * rho_max
    rho2 = rho2 * inverse * _UP + lost_at_all * rho_max * rho_max
    keys = mass_r + eta_r + q_r + p_h + g_h + m
    wrong = blind | (keys != keys)
    values = v2 + rho1 + rho2 + v_max + rho_max
    v_wrong = wrong | (values != values) | (rho_max == float("inf")) | (v_max == float("inf"))
    store_fields(acc, wrong, (eta, q, m, p_h * _DOWN, c_h, eta_r, q_r, m_r, mass_r, log_a))
    store_fields(acc + 10, v_wrong, (v2, rho1, rho2, rho_max * _UP, rho_min * _DOWN, v_max * _UP))


@triton.jit
def store_fields(ptr, wrong, fields):
    """Numbers side by side from ``ptr``, infinite where ``wrong``."""
    for i in tl.static_range(len(fields)):
        tl.store(ptr + i, tl.where(wrong, float("inf"), fields[i]))


@triton.jit
def merge_splits(
    part_o_ptr,
    part_m_ptr,
    out,
    lse_ptr,
    acc_ptr,
    omega_ptr,
    sink_ptr,
    pages,
    rows,
    tail,
    flag_ptr,
    counter_ptr,
    window_left,
    q_len,
    num_splits,
    num_qo_heads,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Grid ``(rows, Hq)``.

    With ``rows`` a row sees ``rows.limit`` paged tokens; with ``tail`` it has ``tail.length`` more outside its pages
    (the new keys of an extend step), in splits after the paged ones, and its output and lse go to row ``tail.target``.
    A row that sees nothing gets output 0, lse -inf and infinite accumulators, and is not counted. Without ``acc_ptr``
    nothing is measured, without ``part_o_ptr`` nothing attended; ``omega_ptr`` takes the largest of field 14.
    """
    if left_out(flag_ptr, acc_ptr is not None):
        return
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    request = row // q_len
    if rows is not None:
        request = tl.load(rows.request + row).to(tl.int64)
    _, length = request_span(pages, request, PAGE)
    position = (length - q_len + row % q_len).to(tl.int32)
    limit = position + 1
    target = row
    beyond = 0
    if rows is not None:
        position = tl.load(rows.position + row)
        limit = tl.minimum(tl.load(rows.limit + row), length)
    if tail is not None:
        beyond = tl.load(tail.length + row)
        target = tl.load(tail.target + row).to(tl.int64)
    paged = (tl.maximum(limit, 0) + _SPLIT - 1) // _SPLIT
    start = 0
    if window_left is not None:
        start = tl.minimum(tl.maximum(position - window_left, 0) // _SPLIT, paged)
    stop = paged + (beyond + _SPLIT - 1) // _SPLIT
    cell = row * num_qo_heads + head
    meta = part_m_ptr + cell * num_splits * _FIELDS

    top = float("-inf")
    for at in range(start, stop, _BLOCK):
        split = at + tl.arange(0, _BLOCK)
        top = tl.maximum(top, tl.max(tl.load(meta + split * _FIELDS, mask=split < stop, other=float("-inf")), 0))
    sink2 = float("-inf")
    if sink_ptr is not None:
        sink2 = tl.load(sink_ptr + head).to(tl.float32) * _LOG2E
        top = tl.maximum(top, tl.ceil(sink2))
    blind = top == float("-inf")
    base = tl.where(blind, 0.0, top)
    sink = 0.0
    if sink_ptr is not None:
        sink = tl.exp2(sink2 - base)
    splits = Splits(meta, start, stop, base, sink)

    channel = tl.arange(0, DV_PAD)
    values = None
    if part_o_ptr is not None:
        values = part_o_ptr + cell * num_splits * DV
    mass, value = merged_output(splits, values, channel, DV)
    inverse = 1.0 / tl.where(blind, 1.0, mass)
    if part_o_ptr is not None:
        place = out.ptr + target * out.row + head * out.head + channel
        tl.store(place, (value * inverse).to(out.ptr.dtype.element_ty), mask=channel < DV)
    lse = tl.where(blind, float("-inf"), base + tl.log2(mass))
    tl.store(lse_ptr + target * num_qo_heads + head, lse)
    if omega_ptr is not None:
        omega = 0.0
        for at in range(start, stop, _BLOCK):
            field, used, _factor = factors(splits, at)
            omega = tl.maximum(omega, largest(field + 14, used))
        tl.store(omega_ptr + target * num_qo_heads + head, tl.where(blind, float("inf"), omega))
    if acc_ptr is not None:
        merge_meter(splits, acc_ptr + cell * 16, inverse, blind, limit + beyond, sink_ptr is not None)
        if counter_ptr is not None:
            if not blind:
                tl.atomic_add(counter_ptr, 1)
