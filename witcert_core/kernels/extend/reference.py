"""Extend attention in float64: an INT8 prefix, then the chunk's own exact keys."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from witcert_core.kernels.decode.reference import read_packed, softmax_error
from witcert_core.kernels.host import slack
from witcert_core.kernels.host.bypass import BypassedKeys
from witcert_core.kernels.host.pages import PageTable
from witcert_core.kernels.repair.pages import RepairedPages
from witcert_core.meter.sums import NUM_ACC_FIELDS, AccField, accumulate
from witcert_core.meter.tv import attention_logits
from witcert_core.quantizers.dither import DitherKey


def extend_reference(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_codes: Tensor,
    v_codes: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
    qo_indptr: Tensor,
    table: PageTable,
    pass_ids: Tensor,
    *,
    layer: int,
    head_ids: Sequence[int],
    key: DitherKey,
    sm_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    delta_loc: Tensor | None = None,
    witness: Tensor | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    repaired: RepairedPages | None = None,
    bypass: BypassedKeys | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[T, H, Dv]``, base-2 lse ``[T, H]`` and accumulators ``[T, H, 16]`` of **all** rows, float64.

    ``delta_loc [T]``; ``sm_scale`` without ``k_scale``, which applies to the prefix alone.
    """
    num_rows, heads, head_dim = q.shape
    out = torch.zeros(num_rows, heads, v_new.shape[2], dtype=torch.float64)
    lse = torch.zeros(num_rows, heads, dtype=torch.float64)
    acc = torch.zeros(num_rows, heads, NUM_ACC_FIELDS, dtype=torch.float64)
    starts, page_size = qo_indptr.tolist(), k_codes.shape[1]
    lengths = table.lengths(page_size)
    groups = heads // k_codes.shape[2]
    for request, (low, high) in enumerate(itertools.pairwise(starts)):
        prefix = lengths[request]
        slots = table.slots(request, prefix, page_size)
        old = read_packed(
            slots,
            k_codes,
            v_codes,
            k_scales,
            v_scales,
            pass_ids,
            layer,
            head_ids,
            key,
            witness,
            repaired,
            bypass,
        )
        old_k, old_v = old.k * k_scale, old.v * v_scale
        for r in range(low, high):
            seen = r - low + 1
            position = prefix + seen - 1
            first = max(position - window_left, 0) if window_left >= 0 else 0
            row, new = q[r].to(torch.float64), k_new[low : r + 1].to(torch.float64)
            z = attention_logits(row, torch.cat((old_k, new)), sm_scale, logits_soft_cap)
            bias = torch.zeros_like(z)
            if alibi_slopes is not None:
                distance = torch.arange(position + 1, dtype=torch.float64) - position
                bias = alibi_slopes.to(torch.float64)[:, None] * distance
            z = z + bias
            norms = row.norm(dim=-1)[:, None] * new.norm(dim=-1).T.repeat_interleave(groups, dim=0)
            c = norms * (abs(sm_scale) * slack.dot_error(head_dim))
            c = c + softmax_error(logits_soft_cap, bias[:, prefix:])
            if prefix:
                delta = 0.0 if delta_loc is None else float(delta_loc[r])
                shown = max(prefix - first, 1)
                scale = sm_scale * k_scale
                digits = q.dtype != torch.float32
                before = old.key_radius(row, scale, delta, shown, logits_soft_cap, bias[:, :prefix], digits)
                c = torch.cat((before, c), dim=-1)
            v = torch.cat((old_v, v_new[low : r + 1].to(torch.float64)))[first:]
            rho = old.value_radius(v_scale)
            rho = torch.cat((rho, torch.zeros(seen, rho.shape[1], dtype=torch.float64)))[first:]
            z, c = z[:, first:], c[:, first:]
            acc[r] = accumulate(z, c, v, rho, sinks)
            largest = v.norm(dim=-1).amax(dim=0).repeat_interleave(groups)
            acc[r, :, AccField.V_RADIUS] = torch.where(acc[r, :, AccField.V_RADIUS].isfinite(), largest, float("inf"))
            extended = z if sinks is None else torch.cat((z, sinks.to(torch.float64)[:, None]), dim=-1)
            total = torch.logsumexp(extended, dim=-1)
            lse[r] = total / math.log(2.0)
            out[r] = torch.einsum("hs,shd->hd", torch.exp(z - total[:, None]), v.repeat_interleave(groups, dim=1))
    return out, lse, acc
