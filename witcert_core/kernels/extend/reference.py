"""Extend attention in float64: an INT8 prefix, then the chunk's own exact keys."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from witcert_core.accumulate import accumulate
from witcert_core.dither import DitherKey, rows
from witcert_core.kernels.common import slack
from witcert_core.kernels.common.pages import PageTable, gather
from witcert_core.kernels.decode.reference import dequantize, key_radius, value_radius
from witcert_core.layout import NUM_ACC_FIELDS, AccField
from witcert_core.tv import attention_logits


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
    row_ids: Tensor,
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
    cast: bool = False,
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
        ids = row_ids[slots].to(torch.int64) & 0xFFFFFFFF
        u = rows(key, ids, layer, head_ids, head_dim)
        old_k = dequantize(gather(k_codes, slots), gather(k_scales, slots), u) * k_scale
        old_v = dequantize(gather(v_codes, slots), gather(v_scales, slots)) * v_scale
        old_rho = value_radius(gather(v_scales, slots), v_new.shape[2]) * abs(v_scale)
        for r in range(low, high):
            seen = r - low + 1
            first = max(prefix + seen - 1 - window_left, 0) if window_left >= 0 else 0
            row, new = q[r].to(torch.float64), k_new[low : r + 1].to(torch.float64)
            z = attention_logits(row, torch.cat((old_k, new)), sm_scale, logits_soft_cap)
            c = torch.zeros_like(z)
            shown = max(prefix - first, 0)
            if prefix:
                c[:, :prefix] = key_radius(
                    row,
                    gather(k_scales, slots),
                    None if witness is None else gather(witness, slots),
                    (ids == 0)[:, None].expand(-1, k_codes.shape[2]),
                    sm_scale * k_scale,
                    0.0 if delta_loc is None else float(delta_loc[r]),
                    max(shown, 1),
                    logits_soft_cap,
                    0.0,
                    cast,
                )
            norms = row.norm(dim=-1)[:, None] * new.norm(dim=-1).T.repeat_interleave(groups, dim=0)
            own = norms * (abs(sm_scale) * slack.dot_error(head_dim)) + slack.SOFTMAX
            c[:, prefix:] = own + max(logits_soft_cap, 0.0) * slack.SOFTCAP + (slack.CAST if cast else 0.0)
            v = torch.cat((old_v, v_new[low : r + 1].to(torch.float64)))[first:]
            rho = torch.cat((old_rho, torch.zeros(seen, old_rho.shape[1], dtype=torch.float64)))[first:]
            z, c = z[:, first:], c[:, first:]
            acc[r] = accumulate(z, c, v, rho, sinks)
            largest = v.norm(dim=-1).amax(dim=0).repeat_interleave(groups)
            acc[r, :, AccField.V_RADIUS] = torch.where(acc[r, :, AccField.V_RADIUS].isfinite(), largest, float("inf"))
            extended = z if sinks is None else torch.cat((z, sinks.to(torch.float64)[:, None]), dim=-1)
            total = torch.logsumexp(extended, dim=-1)
            lse[r] = total / math.log(2.0)
            out[r] = torch.einsum("hs,shd->hd", torch.exp(z - total[:, None]), v.repeat_interleave(groups, dim=1))
    return out, lse, acc
