"""What an attention kernel's own arithmetic may do: to its weights, to their sum, and to the output it hands on.

A kernel takes logits and exponentials in float32, sums the exponentials, casts each of them to a 16-bit dtype for the
product with V (flash kernels cast what they multiply, and divide by the sum of what they did not cast), accumulates
that product in float32 and rounds the result to the output's dtype. Every bound here is against the same attention in
real arithmetic over the keys and values that the kernel read, whatever these are: nothing here is about quantization.

Shapes: C cells (query heads of a row, or of several), S tokens, Hkv KV heads, Dv value channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from witcert_core.meter.contraction import by_kv_head, contract_up

SOFTMAX_FP32 = 2.0**-20
"""Logit error that stands for an exponential in fp32 and the products that follow it."""
RESCALE_FP32 = 2.0**-27
"""The same, per token seen, for weights that are rescaled as the maximum moves: 2^-22 for 32 tokens or more."""
SOFTCAP_FP32 = 2.0**-21
"""Error of ``cap * tanh(z / cap)`` in fp32, as a share of the cap."""
SUM_UNIT = 2.0**-23
"""Error of one fp32 addition, in any order; tensor cores truncate, so it is twice that of rounding to nearest."""
FEW_STEPS = 16
"""Roundings of a sum that do not grow with its terms: products, rescaling, splits, the division, a scale of V."""
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
"""Relative error of rounding to nearest."""
LEAST = {torch.float16: 2.0**-25}
"""Absolute error of rounding to nearest where it is above 2^-126: float16 is subnormal below 2^-14."""
_UP = 1.0 + 2.0**-36


@dataclass(frozen=True)
class KernelArithmetic:
    """The dtypes of a kernel, where they are not float32.

    Args:
        weights: what weights are cast to before the product with V, one or several; none where they are not cast.
        output: that of the tensor handed on.
        truncates: casts may round towards zero, not to nearest (vLLM's bfloat16 on a CPU without AVX512_BF16).
        merges: outputs over parts of the tokens may have been rounded to the output's dtype before they were merged
            (FlashInfer's chunk over a prefix, cascades over a shared one).
        merged_tokens: so many tokens at a time are attended by themselves and merged one after the other by the
            logarithm of their sums, in float32 (vLLM's latent attention on a CPU); 0 where that is not done.
    """

    weights: tuple[torch.dtype, ...]
    output: torch.dtype
    truncates: bool = False
    merges: bool = False
    merged_tokens: int = 0

    @classmethod
    def of(cls, q: torch.dtype, *stored: torch.dtype) -> KernelArithmetic:
        """The least exact one that an engine may have for queries ``q`` over a pool of these dtypes.

        16-bit kernels cast weights to the dtype of V, or of Q once V is cast to it; those that do not are better than
        claimed. Where neither says which 16 bits (an 8-bit pool under float32 queries), bfloat16 is assumed. Parts of
        16-bit outputs may be rounded by themselves.
        """
        given = (q, *stored)
        if min(dtype.itemsize for dtype in given) >= 4:
            return cls((), q)
        merges = q.itemsize < 4
        half = torch.float16 in given and torch.bfloat16 not in given
        return cls((torch.float16 if half else torch.bfloat16,), q, merges=merges)

    @property
    def cast_unit(self) -> float:
        """Largest relative change of a weight by its cast; 0 where it is not cast."""
        return max((self._unit(dtype) for dtype in self.weights), default=0.0)

    @property
    def cast_radius(self) -> float:
        """The same as a logit error."""
        return self.cast_unit * (1.0 + 2.0 * self.cast_unit) if self.truncates else self.cast_unit

    @property
    def output_unit(self) -> float:
        """Largest relative change of an output's channel by its rounding."""
        return self._unit(self.output)

    @property
    def output_least(self) -> float:
        """Largest absolute change of an output's channel by its rounding, beside the relative one."""
        return LEAST.get(self.output, 2.0**-126) * (2.0 if self.truncates else 1.0)

    def _unit(self, dtype: torch.dtype) -> float:
        if dtype not in UNIT:
            # An 8-bit output, or weights in it, would lose more than anything here allows for.
            raise ValueError(f"dtype is {dtype}; kernels are known that compute in {', '.join(map(str, UNIT))}")
        return UNIT[dtype] * (2.0 if self.truncates else 1.0)


def kernel_radius(
    q: Tensor, k: Tensor, sm_scale: float, logits_soft_cap: float, arithmetic: KernelArithmetic
) -> Tensor:
    """``omega [C, S]`` float64: how far a kernel's weights can be from real arithmetic, as an error of each logit.

    Args:
        q: ``[C, D]``; cell ``i`` reads KV head ``i // (C / Hkv)``.
        k: ``[S, Hkv, D]`` keys the kernel read.
    """
    fixed = SOFTMAX_FP32 + max(logits_soft_cap, 0.0) * SOFTCAP_FP32
    radius = arithmetic_radius(q, k, sm_scale)
    if arithmetic.merged_tokens:
        largest = radius.amax(dim=-1, keepdim=True) / _dot_unit(q.shape[-1]) if len(k) else radius
        radius = radius + merge_radius(largest, len(k), arithmetic.merged_tokens)
    return radius + (fixed + arithmetic.cast_radius)


def merge_radius(largest: Tensor, num_tokens: int, merged_tokens: int) -> Tensor:
    """Error of a logit ``[...]`` that merging parts by the logarithm of their sums makes, one after the other.

    No such logarithm is beyond ``L = max |z| + ln S``. A merge rounds the part's and the new one, and their differences
    of at most ``2 L`` before the exponential: ``(3 L + 8) 2^-23`` with the exponentials and the division. It shifts
    whatever came before against the part, so the errors of all merges add up.

    Args:
        largest: ``[...]`` at least every ``|z|`` of a cell.
    """
    parts = -(-num_tokens // merged_tokens)
    return parts * (3.0 * (largest + math.log(max(num_tokens, 1))) + 8.0) * (2.0**-23 * _UP)


def weight_error(omega: Tensor, num_tokens: Tensor | int, arithmetic: KernelArithmetic) -> Tensor:
    """Bound ``[C]`` on TV between p~ and a kernel's weights, each divided by their own sum, for `omega` ``[C, S]``.

    No set's odds change by more than ``e^(2 omega)``, which moves ``tanh(omega / 2)`` at most. Added is what float16
    loses in absolute terms: below ``2^-14`` it is subnormal, and an unnormalised weight in [0, 1] is then off by up to
    ``2^-25`` whatever its size, which no relative term covers once tens of thousands of tokens are seen.
    """
    seen = torch.as_tensor(num_tokens, dtype=torch.float64, device=omega.device)
    return odds_moved(omega.to(torch.float64).amax(dim=-1), seen) + lost_weight(seen, arithmetic)


def odds_moved(omega: Tensor, num_tokens: Tensor) -> Tensor:
    """``tanh(omega / 2)`` for the largest omega of each cell ``[...]``, with what rescaling weights adds."""
    return torch.tanh(0.5 * (omega + num_tokens * RESCALE_FP32)) * _UP


def lost_weight(num_tokens: Tensor, arithmetic: KernelArithmetic) -> Tensor:
    """Share ``[...]`` of the mass, ``S 2^-24``, that may be in weights too small for float16; 0 for wider ranges."""
    return num_tokens * (2.0**-24 if torch.float16 in arithmetic.weights else 0.0)


def mass_error(num_tokens: Tensor | int, arithmetic: KernelArithmetic) -> Tensor:
    """``theta [...]`` float64: a kernel's weights sum to ``1 + theta'``, ``|theta'| <= theta``, and not to 1.

    Cast weights are divided by the float32 sum of those that were not cast, itself off by a unit for each addition.
    """
    seen = torch.as_tensor(num_tokens, dtype=torch.float64)
    cast = arithmetic.cast_unit + lost_weight(seen, arithmetic)
    added = (seen + FEW_STEPS) * UNIT[torch.float32]  # no tensor core sums weights
    return ((1.0 + cast) / (1.0 - added).clamp(min=2.0**-20) - 1.0) * _UP


def output_error(
    weight_tv: Tensor,
    *,
    num_tokens: Tensor | int,
    norm: Tensor,
    mean_norm: Tensor,
    max_norm: Tensor,
    diameter: Tensor,
    v_dim: int,
    arithmetic: KernelArithmetic,
) -> Tensor:
    """Bound on ``||o' - sum p~ v~||``: o' as the kernel hands it on, p~ and the sum in real arithmetic.

    With p' the kernel's weights divided by their own sum, ``o' = round((1 + theta) sum p' v~ + e)``. Four terms:

    * ``weight_tv`` times the diameter, for ``sum p' v~``;
    * ``theta`` (:func:`mass_error`) times ``||sum p' v~||``: mass that casting takes or adds, whatever the diameter;
    * ``(S + 16) 2^-23 sum p' ||v~||`` for e, products and sums in float32 in any order;
    * the rounding of each channel to the output's dtype, of which overflow is no part: an output that is not finite is
      no output. Where parts are merged each of them was rounded before, and they may cancel: ``sum p' ||v~||`` then
      counts, not the norm of what is left.

    Args:
        weight_tv: ``[...]`` bound on TV(p', p~), of `weight_error`.
        num_tokens: tokens seen, a number or ``[...]``.
        norm: ``[...]`` at least ``||sum p~ v~||``.
        mean_norm: ``[...]`` at least ``sum p~ ||v~||``.
        max_norm: ``[...]`` at least every ``||v~||``.
        diameter: ``[...]`` at least every ``||v~_s - v~_t||``, with 0 among the values where a learned sink takes part.
        v_dim: Dv.

    Returns:
        float64 ``[...]``, rounded up; +inf where an argument is unknown, never NaN.
    """
    tv, norm, mean_norm, max_norm, diameter = (
        x.to(torch.float64) for x in (weight_tv, norm, mean_norm, max_norm, diameter)
    )
    seen = torch.as_tensor(num_tokens, dtype=torch.float64, device=tv.device)
    theta = mass_error(seen, arithmetic)
    moved = tv * diameter
    before = torch.minimum(norm + moved, max_norm)
    lengths = (1.0 + theta) * torch.minimum(mean_norm + tv * max_norm, max_norm)
    summed = (seen + FEW_STEPS) * SUM_UNIT * lengths
    least = v_dim**0.5 * arithmetic.output_least
    if arithmetic.merges:
        summed = summed + (arithmetic.output_unit * (lengths + summed) + least)
    handed = before * (1.0 + theta) + summed
    rounded = arithmetic.output_unit * handed + least
    total = (moved + theta * before + summed + rounded) * _UP
    known = reduce(torch.logical_and, (x.isfinite() for x in (norm, mean_norm, max_norm, diameter, tv)))
    return torch.where(known, total, float("inf")).nan_to_num(nan=float("inf"), posinf=float("inf"))


def attention_error(
    weights: Tensor,
    v: Tensor,
    omega: Tensor,
    *,
    num_tokens: Tensor | int,
    arithmetic: KernelArithmetic,
) -> Tensor:
    """Bound ``[C]`` float64 on ``||o' - sum p~ v~||`` of cells whose weights and values are all at hand.

    What a second audit needs: o' is a cell of the tensor an engine handed on, p~ the float64 softmax over the stored
    keys it should have attended (its window and mask applied), ``sum p~ v~`` their float64 sum. A larger distance says
    that the engine attended something else, not that it rounded.

    Args:
        weights: ``[C, S]`` p~ float64, a learned sink's last if there is one (``[C, S + 1]``); 0 for tokens a cell
            does not see.
        v: ``[S, Hkv, Dv]`` stored values as the kernel reads them.
        omega: ``[C, S]`` of `kernel_radius`, 0 for tokens a cell does not see.
        num_tokens: tokens seen, a number or ``[C]``.
        arithmetic: the kernel's; :meth:`KernelArithmetic.of` where no more is known than dtypes.
    """
    cells, tokens = omega.shape
    group, value = cells // v.shape[1], v.to(torch.float64)
    own = weights[:, :tokens].to(torch.float64).reshape(v.shape[1], group, tokens)
    seen = (omega > 0).reshape(own.shape)
    square = value.square().sum(dim=-1).T[:, None]
    out = torch.einsum("kgs,skd->kgd", own, value)
    norm = out.norm(dim=-1)
    # ||v - o||^2 expanded, to avoid a tensor [C, S, Dv]; what cancels is added back.
    reach = square + norm.square()[..., None]
    apart = (reach * (1.0 + 2.0**-40) - 2.0 * torch.einsum("kgd,skd->kgs", out, value)).clamp(min=0.0)
    # A token that is not seen has weight 0, but so may one whose weight underflowed: all that is not masked counts.
    longest, radius = (torch.where(seen, x, 0.0).amax(dim=-1).sqrt() for x in (square, apart))
    if weights.shape[1] > tokens:
        radius = torch.maximum(radius, norm)  # a sink adds the value 0
    return output_error(
        weight_error(omega, num_tokens, arithmetic),
        num_tokens=num_tokens,
        norm=(norm * _UP).flatten(),
        mean_norm=(torch.einsum("kgs,kgs->kg", own, square.sqrt().expand_as(own)) * _UP).flatten(),
        max_norm=(longest * _UP).flatten(),
        diameter=(2.0 * radius * _UP).flatten(),
        v_dim=v.shape[-1],
        arithmetic=arithmetic,
    )


def _dot_unit(channels: int) -> float:
    """Error of a float32 dot product over so many channels, as a share of ``sum_i |q_i| |k_i|``."""
    return (channels + 2) * 2.0**-23


def arithmetic_radius(q: Tensor, k: Tensor, sm_scale: float) -> Tensor:
    """Error of the kernel's own fp32 dot product, ``(D + 2) 2^-23 |sm_scale| sum_i |q_i| |k_i|``.

    Holds for IEEE fp32 products and sums in any order; TF32 is outside it.

    Args:
        q: ``[H, D]``.
        k: ``[S, Hkv, D]`` the keys the kernel read.

    Returns:
        float64 ``[H, S]``.
    """
    factor = _dot_unit(q.shape[-1]) * abs(sm_scale)
    if k.element_size() > 4:
        return contract_up(q.to(torch.float64).abs(), k.to(torch.float64).abs(), factor)
    # In float32, half the memory of the largest tensor there is; rounded up, also for matmuls of lower precision.
    query = q.to(torch.float64).abs().to(torch.float32).clamp_(min=2.0**-126).mul_(1.0 + 2.0**-22)
    grouped = by_kv_head(query, k.shape[1], sm_scale)
    total = torch.einsum("kgd,skd->kgs", grouped, k.to(torch.float32).abs()).reshape(q.shape[0], -1)
    total = total.to(torch.float64).mul_((1.0 + 2.0**-6) * factor).add_(2.0**-100 * factor)
    return total.nan_to_num_(nan=float("inf"), posinf=float("inf"))
