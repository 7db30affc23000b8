"""From logits and radii of some cells to their bounds: the one place where sums become a meter.

Shapes: C cells (query heads of a row, or of several rows), S tokens, Hkv KV heads, D and Dv channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from witcert_core.accumulate import accumulate
from witcert_core.bounds import FORM_NAMES, FORMS, extremal, meter
from witcert_core.layout import NUM_ACC_FIELDS
from witcert_core.output import output_bound
from witcert_core.radii import CAST_16BIT, arithmetic_radius
from witcert_core.tv import softmax_with_sink

SOFTMAX_FP32 = 2.0**-20
"""Logit error that stands for exponentials, their fp32 sum and the division by it."""
SOFTCAP_FP32 = 2.0**-21
"""Error of ``cap * tanh(z / cap)`` in fp32, as a share of the cap."""


@dataclass(frozen=True)
class Terms:
    """What is summed over the tokens of each cell; leading dimensions are free, so terms of rows can be stacked.

    Args:
        acc: ``[..., 16]`` accumulators.
        extra: ``[...]`` further TV between these weights and the engine's; 0 for fused weights.
        norm: ``[...]`` ``||o~||``.
        swept: ``[...]`` the ``extremal`` bound if asked for, else 0.
    """

    acc: Tensor
    extra: Tensor
    norm: Tensor
    swept: Tensor


def kernel_radius(q: Tensor, k: Tensor, sm_scale: float, logits_soft_cap: float, sixteen_bit: bool) -> Tensor:
    """``omega [C, S]`` float64: how far an engine's own fp32 kernel can be from real arithmetic, per logit.

    Args:
        q: ``[C, D]``; cell ``i`` reads KV head ``i // (C / Hkv)``.
        k: ``[S, Hkv, D]`` keys the kernel read.
        sixteen_bit: weights or values pass through a 16-bit dtype.
    """
    omega = arithmetic_radius(q, k, sm_scale) + SOFTMAX_FP32 + max(logits_soft_cap, 0.0) * SOFTCAP_FP32
    return omega + CAST_16BIT if sixteen_bit else omega


def weight_underflow(num_tokens: int, *dtypes: torch.dtype) -> float:
    """TV that float16 weights can lose in absolute terms, ``S 2^-24``; 0 for wider ranges.

    Below ``2^-14`` float16 is subnormal: an unnormalised weight in [0, 1] is then off by up to ``2^-25`` whatever its
    size, which the relative term of `kernel_radius` does not cover once tens of thousands of tokens are seen.
    """
    return num_tokens * 2.0**-24 if torch.float16 in dtypes else 0.0


def sum_terms(
    logits: Tensor,
    c: Tensor,
    omega: Tensor,
    v: Tensor,
    rho: Tensor,
    *,
    sinks: Tensor | None = None,
    form: str = "auto",
    fused: bool = False,
    underflow: float = 0.0,
) -> Terms:
    """Sum over S tokens. A token that a cell does not see has logit -inf, radius 0 and omega 0 there.

    Args:
        logits: ``[C, S]`` compressed logits, float64.
        c: ``[C, S]`` radii of the compression.
        omega: ``[C, S]`` radii of the kernel's own arithmetic. With ``fused=True`` they are part of each radius; with
            ``fused=False`` the engine's weights lie within ``tanh(max omega / 2)`` of these.
        v: ``[S, Hkv, Dv]`` stored values, float64.
        rho: ``[S, Hkv]`` radii of the values.
        sinks: ``[C]`` learned sink logits.
        underflow: absolute TV lost to weights too small for the kernel's dtype, see `weight_underflow`.
    """
    radius = c + omega if fused else c
    acc = accumulate(logits, radius, v, rho, sinks)
    extra = torch.zeros_like(acc[..., 0]) if fused else torch.tanh(0.5 * omega.amax(dim=-1))
    if fused and sinks is not None:
        # The sink carries no radius of its own, but its exponential is computed in fp32 like the others.
        extra = extra + math.tanh(0.5 * SOFTMAX_FP32)
    extra = extra + underflow
    weights = softmax_with_sink(logits, sinks)
    swept = torch.zeros_like(extra)
    if form == "extremal":
        swept = extremal.bound(weights, torch.nn.functional.pad(radius, (0, int(sinks is not None))))
    return Terms(acc, extra, output_norm(weights[:, : logits.shape[-1]], v), swept)


def stack_terms(rows: Sequence[Terms], num_rows: int, cells: int, device: torch.device) -> Terms:
    """Terms of rows ``[C, ...]`` as one ``[R, C, ...]``; with no row, empty tensors of that shape."""
    if not rows:
        empty = torch.zeros(num_rows, cells, dtype=torch.float64, device=device)
        return Terms(torch.zeros(num_rows, cells, NUM_ACC_FIELDS, dtype=torch.float64, device=device), *[empty] * 3)
    return Terms(*(torch.stack([getattr(row, f.name) for row in rows]) for f in fields(Terms)))


def bounds_of(terms: Terms, form: str, has_sink: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Bound on TV in [0, 1], int64 index of the deciding form, absolute output bound; each ``[...]``."""
    if form == "auto":
        tv, which = meter(terms.acc)
    else:
        tv = (terms.swept if form == "extremal" else FORMS[form](terms.acc)).clamp(max=1.0)
        which = torch.full_like(tv, FORM_NAMES.index(form), dtype=torch.int64)
    out = output_bound(terms.acc, tv, terms.norm, has_sink, terms.extra)
    return (tv + terms.extra).clamp(max=1.0), which, out


def output_norm(weights: Tensor, v: Tensor) -> Tensor:
    """``||sum p~ v~||`` per cell, ``[C]``, for weights ``[C, S]`` and values ``[S, Hkv, Dv]``."""
    cells, kv_heads = weights.shape[0], v.shape[1]
    grouped = weights.reshape(kv_heads, cells // kv_heads, -1)
    out = torch.einsum("kgs,skd->kgd", grouped, v).reshape(cells, -1)
    return out.square().sum(dim=-1).sqrt()
