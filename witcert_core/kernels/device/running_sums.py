"""Device functions of the meter: weights of a tile, growth of a weight, and the running state of a split.

A split's state is kept per *lane* (a token's row of the tile): each lane remembers its heaviest token apart
and the sums over its others, so that the loop over tiles holds no cross-lane reduction but the maximum of the
logits. Weights are relative to ``2^ref`` with an **integer** ``ref``: rescaling when the maximum moves is
exact.
"""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# mypy: disable-error-code="assignment,index"

from __future__ import annotations

import triton
import triton.language as tl

from witcert_core.kernels.host import slack

_UP = tl.constexpr(slack.RADIUS_UP)
_SOFTMAX = tl.constexpr(slack.SOFTMAX)
_SOFTCAP = tl.constexpr(slack.SOFTCAP)
_FAR = tl.constexpr(slack.FAR)
_LOG2E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-(2.0**30))
_GROWTH_ARGUMENT_MAX = tl.constexpr(80.0)
_GROWTH_FACTOR_MAX = tl.constexpr(2.4e17)
_LOG2E_UP = tl.constexpr(1.4426950408889634 * (1.0 + 2.0**-22))


@triton.jit
def growth(c):
    """``expm1(min(c, 80))`` for ``c >= 0``, rounded up, by at most ``2^-20 e^c``.

    The exponential errs by 2^-22 and its argument's rounding is in the constant. What rounding up adds to ``eta`` is
    less than the radius that every token has for the softmax (``slack.SOFTMAX``).
    """
    return tl.exp2(tl.where(c > _GROWTH_ARGUMENT_MAX, _GROWTH_ARGUMENT_MAX, c) * _LOG2E_UP) * (1.0 + 2.0**-21) - 1.0


@triton.jit
def capped(g):
    """A growth as the second factor of its square, so that the square stays finite in fp32."""
    return tl.where(g > _GROWTH_FACTOR_MAX, _GROWTH_FACTOR_MAX, g)


@triton.jit
def soft_cap(z, cap):
    """``cap * tanh(z / cap)``, or ``z`` where there is no cap."""
    if cap is None:
        return z
    else:
        return cap - 2.0 * cap / (1.0 + tl.exp(2.0 * z / cap))


@triton.jit
def next_reference(z2, ref):
    """New integer exponent ``[M]``, its finite stand-in, and the exact factor of what was summed before."""
    new = tl.maximum(ref, tl.ceil(tl.max(z2, 0)))
    safe = tl.where(new == float("-inf"), 0.0, new)
    factor = tl.where(ref == float("-inf"), 0.0, tl.exp2(ref - safe))
    return new, safe, factor


@triton.jit
def weigh(z, visible, ref):
    """Weights ``[N, M]`` of logits ``z``, the new reference, the factor of the old sums, and the exponents.

    The exponents ``z - ref`` in base 2 are what :func:`softmax_radius` needs.
    """
    z2 = tl.where(visible, z * _LOG2E, float("-inf"))
    ref, safe, factor = next_reference(z2, ref)
    gap = z2 - safe[None, :]
    return tl.exp2(gap), ref, factor, gap


@triton.jit
def fixed_radius(cap, CAST: tl.constexpr):
    """Error of exponentiating and capping a logit, the same for every token, as a radius (``slack.py``).

    ``CAST``: of weights that are cast to 16 bit: beside that, :func:`far_radius` at its largest costs little.
    """
    c = tl.full((), _SOFTMAX + (150.0 * _FAR if CAST else 0.0), tl.float32)
    if cap is not None:
        c += cap * _SOFTCAP
    return c


@triton.jit
def far_radius(gap):
    """Error of the exponents ``gap [N, M]``, base 2: far below the maximum the subtraction rounds; beyond 2^-150 the
    weight is 0 anyway."""
    return tl.where(gap < -150.0, 150.0, -gap) * _FAR


@triton.jit
def softmax_radius(gap, cap, CAST: tl.constexpr):
    """Both of the above ``[N, M]``."""
    c = tl.zeros_like(gap) + fixed_radius(cap, CAST)
    if not CAST:
        c += far_radius(gap)
    return c


@triton.jit
def squares(parts, N: tl.constexpr, NG: tl.constexpr):
    """``sum_i x_i^2`` ``[N]`` of a tuple of ``NG`` tiles ``[N, 32]``."""
    total = tl.zeros((N,), tl.float32)
    for g in tl.static_range(NG):
        x = parts[g].to(tl.float32)
        total += tl.sum(x * x, 1)
    return total


@triton.jit
def query_length(q, M: tl.constexpr, NG: tl.constexpr):
    """``||q||`` rounded up ``[M]`` of a tuple of ``[32, M]``; ``2^-58`` stands for squares that underflow."""
    total = tl.zeros((M,), tl.float32)
    for g in tl.static_range(NG):
        x = q[g].to(tl.float32)
        total += tl.sum(x * x, 0)
    return tl.sqrt(total) * _UP + 3.469446951953614e-18


@triton.jit
def meter_start(N: tl.constexpr, M: tl.constexpr, W: tl.constexpr):
    """Empty lanes ``[N, M]``: heaviest weight and radius, rest weight, eta, Q, largest radius; and V2, rho,
    rho^2, and ``[N, W]`` largest and smallest rho, largest ``||v||^2``.

    Two tuples, so that one can rest while the other is worked on. ``W`` is 1 where all rows see the same tokens:
    what is live here adds to the registers of the whole kernel.
    """
    zero = tl.zeros((N, M), tl.float32)
    one = tl.zeros((N, W), tl.float32)
    return (zero, zero, zero, zero, zero, zero), (zero, zero, zero, one, one + float("inf"), one)


@triton.jit
def meter_weights(lanes, factor, w, c):
    """Take in weights ``w`` and radii ``c`` ``[N, M]`` of one tile, both 0 where invisible."""
    wh, ch, rest, eta, q, big = lanes
    scale = factor[None, :]
    wh = wh * scale
    newer = w > wh
    out_w = tl.where(newer, wh, w)
    out_c = tl.where(newer, ch, c)
    wh = tl.where(newer, w, wh)
    ch = tl.where(newer, c, ch)
    g = growth(out_c)
    first = out_w * g
    rest = rest * scale + out_w
    eta = eta * scale + first
    q = q * scale + first * capped(g)
    big = tl.where(out_c > big, out_c, big)
    return wh, ch, rest, eta, q, big


@triton.jit
def meter_values(lanes, factor, w, v_square, rho, visible):
    """Take in ``||v||^2`` and value radii ``[N]`` of one tile; ``visible [N, W]``."""
    v2, r1, r2, rho_max, rho_min, v_max = lanes
    scale = factor[None, :]
    v2 = v2 * scale + w * v_square[:, None]
    r1 = r1 * scale + w * rho[:, None]
    r2 = r2 * scale + w * (rho * rho)[:, None]
    rho_max = tl.where(visible & (rho[:, None] > rho_max), rho[:, None], rho_max)
    rho_min = tl.where(visible & (rho[:, None] < rho_min), rho[:, None], rho_min)
    v_max = tl.where(visible & (v_square[:, None] > v_max), v_square[:, None], v_max)
    return v2, r1, r2, rho_max, rho_min, v_max


@triton.jit
def sees_some(valid, first, limit, begin, end, WINDOW: tl.constexpr, MULTI: tl.constexpr):
    """Whether a pair ``[M]`` sees a token of the split ``begin .. end``, of which each request has some."""
    sees = valid
    if WINDOW:
        sees = sees & (first < end)
    if MULTI:
        sees = sees & (limit > begin)
    return sees


@triton.jit
def store_sums(ptr, ref, total, mask, sees):
    """Fields 0 and 1 of a split at ``ptr [M]``: the reference, and the sum of the weights ``[N, M]``.

    ``-inf`` says that a pair sees nothing here, and the merge then leaves the split out. A pair that does, but no logit
    above ``-inf`` (no maximum remembers a NaN), gets the lowest reference instead, so that what is unknown is merged.
    """
    tl.store(ptr, tl.where(sees & (ref == float("-inf")), _LOWEST, ref), mask=mask)
    tl.store(ptr + 1, tl.sum(total, 0), mask=mask)


@triton.jit
def meter_store(weights, values, ptr, mask, known, N: tl.constexpr):
    """Reduce the lanes and store the other fields of a split at ``ptr [M]``; pairs not ``known`` have no radius."""
    wh, ch, rest, eta, q, big = weights
    v2, r1, r2, rho_max, rho_min, v_max = values
    # NaN reaches the sums below; it must not reach the search for the maximum.
    lane = tl.argmax(tl.where(wh == wh, wh, 0.0), 0)
    is_h = tl.arange(0, N)[:, None] == lane[None, :]
    other_w = tl.where(is_h, 0.0, wh)
    other_c = tl.where(is_h, 0.0, ch)
    g = growth(other_c)
    first = other_w * g
    tl.store(ptr + 2, tl.max(wh, 0), mask=mask)
    tl.store(ptr + 3, tl.sum(tl.where(is_h, ch, 0.0), 0), mask=mask)
    tl.store(ptr + 4, tl.sum(rest + other_w, 0), mask=mask)
    tl.store(ptr + 5, tl.sum(eta + first, 0), mask=mask)
    tl.store(ptr + 6, tl.sum(q + first * capped(g), 0), mask=mask)
    largest = tl.max(tl.where(other_c > big, other_c, big), 0)
    tl.store(ptr + 7, tl.where(known, largest, float("inf")), mask=mask)
    tl.store(ptr + 8, tl.sum(v2, 0), mask=mask)
    tl.store(ptr + 9, tl.sum(r1, 0), mask=mask)
    tl.store(ptr + 10, tl.sum(r2, 0), mask=mask)
    tl.store(ptr + 11, tl.max(rho_max, 0), mask=mask)
    tl.store(ptr + 12, tl.min(rho_min, 0), mask=mask)
    tl.store(ptr + 13, tl.sqrt(tl.max(v_max, 0)), mask=mask)


@triton.jit
def union_tail(visible, delta):
    """``sqrt(2 ln(2 S / delta))`` rounded up ``[M]``; infinite where ``delta`` is 0."""
    share = tl.where(delta > 0.0, delta, 1.0)
    log = tl.log(2.0 * visible.to(tl.float32)) - tl.log(share)
    tail = tl.sqrt(2.0 * log) * 1.0001
    return tl.where(delta > 0.0, tail, float("inf"))
