"""Decode attention over INT8 pages in float64, and the accumulators the kernel must not fall below."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from witcert_core.accumulate import accumulate
from witcert_core.dither import DitherKey, rows
from witcert_core.kernels.common import slack
from witcert_core.kernels.common.bypass import BypassedKeys
from witcert_core.kernels.common.pages import PageTable, gather
from witcert_core.kernels.repair.pages import RepairedPages
from witcert_core.layout import NUM_ACC_FIELDS, AccField
from witcert_core.radii import radius_dither, radius_group_witness


def dequantize(codes: Tensor, scales: Tensor, u: Tensor | float = 0.0) -> Tensor:
    """``s (code - u)`` (K dithered, V with ``u = 0``) in float64 ``[S, Hkv, D]``, unrounded; 0 where the
    scale is not finite."""
    s = scales.to(torch.float64)
    s = torch.where(s.isfinite() & (s >= 0), s, 0.0).repeat_interleave(32, dim=-1)[..., : codes.shape[-1]]
    return s * (codes.to(torch.float64) - torch.as_tensor(u, dtype=torch.float64))


def value_radius(scales: Tensor, channels: int) -> Tensor:
    """``(1 + 2^-13) sqrt(sum_g n_g s_g^2) / 2``, float64 ``[S, Hkv]``; infinite where a scale is not
    finite."""
    s = scales.to(torch.float64)
    sizes = torch.full((s.shape[-1],), 32.0, dtype=torch.float64)
    sizes[-1] = channels - 32 * (s.shape[-1] - 1)
    rho = (sizes * s.square()).sum(dim=-1).sqrt() * (0.5 * (1.0 + 2.0**-13))
    return torch.where((s.isfinite() & (s >= 0)).all(dim=-1), rho, float("inf"))


def key_radius(
    q: Tensor,
    scales: Tensor,
    witness: Tensor | None,
    never: Tensor,
    sm_scale: float,
    delta_loc: float,
    num_visible: int,
    logits_soft_cap: float,
    bias: Tensor | float,
    cast: bool,
) -> Tensor:
    """``c [H, S]``: quantization radius plus the arithmetic of the fp32 kernel (``common/slack.py``)."""
    s = torch.where(scales >= 0, scales, float("inf"))
    s = torch.where(never[:, :, None], float("inf"), s.to(torch.float64))
    c = radius_dither(q, s, sm_scale, delta_loc, num_visible)
    if witness is not None:
        c = torch.minimum(c, radius_group_witness(q, s, witness, sm_scale))
    half_steps = radius_dither(q, s, sm_scale, 0.0, num_visible)
    c = c + half_steps * (2.0 * slack.MAX_CODE * slack.int8_dot_error(s.shape[-1])) + slack.SOFTMAX
    c = c + max(logits_soft_cap, 0.0) * slack.SOFTCAP + abs(torch.as_tensor(bias)) * slack.BIAS
    return c + slack.CAST if cast else c


def bypass_error(q_bypass: Tensor, stored: Tensor, bypass: BypassedKeys, sm_scale: float) -> Tensor:
    """Rounding of the fp32 product over the bypassed channels ``[H, S]``: ``q_bypass [H, D]`` is 0 elsewhere,
    ``stored [S, Hkv, 2 m]``."""
    groups = q_bypass.shape[0] // stored.shape[1]
    norms = q_bypass.norm(dim=-1)[:, None] * stored.double().norm(dim=-1).T.repeat_interleave(groups, dim=0)
    return norms * (abs(sm_scale) * slack.dot_error(stored.shape[2] + 1))


def decode_reference(
    q: Tensor,
    k_codes: Tensor,
    v_codes: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
    table: PageTable,
    row_ids: Tensor,
    *,
    layer: int,
    head_ids: Sequence[int],
    key: DitherKey,
    sm_scale: float,
    v_scale: float = 1.0,
    delta_loc: Tensor | None = None,
    witness: Tensor | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_len: int = 1,
    cast: bool = False,
    repaired: RepairedPages | None = None,
    bypass: BypassedKeys | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[R, H, Dv]``, base-2 lse ``[R, H]`` and accumulators ``[R, H, 16]``, all float64.

    ``R = B * q_len`` rows; row ``i`` of a request sees its tokens up to ``length - q_len + i``. Arguments as
    in :func:`witcert_core.kernels.decode.decode_int8`, codes already split into ``[P, page_size, Hkv, D]``.
    """
    num_rows, heads, head_dim = q.shape
    page_size, v_dim = k_codes.shape[1], v_codes.shape[-1]
    out = torch.zeros(num_rows, heads, v_dim, dtype=torch.float64)
    lse = torch.full((num_rows, heads), float("-inf"), dtype=torch.float64)
    acc = torch.full((num_rows, heads, NUM_ACC_FIELDS), float("inf"), dtype=torch.float64)
    lengths = table.lengths(page_size)
    for r in range(num_rows):
        request, step = divmod(r, q_len)
        position = lengths[request] - q_len + step
        first = max(position - window_left, 0) if window_left >= 0 else 0
        if position < 0:
            continue
        slots = table.slots(request, position + 1, page_size)[first:]
        ids = row_ids[slots].to(torch.int64) & 0xFFFFFFFF
        u = rows(key, ids, layer, head_ids, head_dim)
        k = dequantize(gather(k_codes, slots), gather(k_scales, slots), u)
        v = dequantize(gather(v_codes, slots), gather(v_scales, slots)) * v_scale
        old_k, old_v = gather(k_scales, slots), gather(v_scales, slots)
        never = (ids == 0)[:, None].expand(k.shape[:2])
        row = q[r].to(torch.float64)
        groups = heads // k.shape[1]
        spared, own = row, torch.zeros(heads, slots.numel(), dtype=torch.float64)
        if bypass is not None:
            spared = bypass.spare(row)
            own = own + bypass_error(row - spared, gather(bypass.k, slots), bypass, sm_scale)
            k = bypass.put(k, gather(bypass.k, slots))
        if repaired is not None:
            entry = repaired.index[slots // page_size].to(torch.int64)
            fixed = (entry >= 0)[..., None]
            offset = (slots % page_size)[:, None]
            k = torch.where(fixed, repaired.k[entry, offset].to(torch.float64), k)
            v = torch.where(fixed, repaired.v[entry, offset].to(torch.float64), v)
            old_k, old_v = torch.where(fixed, 0.0, old_k), torch.where(fixed, 0.0, old_v)
            never = never & ~fixed[..., 0]
            norms = k.norm(dim=-1).T.repeat_interleave(groups, dim=0) * row.norm(dim=-1)[:, None]
            exact = fixed[..., 0].T.repeat_interleave(groups, dim=0)
            own = own + torch.where(exact, norms, 0.0) * (abs(sm_scale) * slack.dot_error(head_dim))
        z = torch.einsum("hd,shd->hs", row, k.repeat_interleave(groups, dim=1)) * sm_scale
        if logits_soft_cap > 0:
            z = logits_soft_cap * torch.tanh(z / logits_soft_cap)
        bias: Tensor | float = 0.0
        if alibi_slopes is not None:
            distance = torch.arange(first, position + 1, dtype=torch.float64) - position
            bias = alibi_slopes.to(torch.float64)[:, None] * distance
            z = z + bias
        c = key_radius(
            spared,
            old_k,
            None if witness is None else gather(witness, slots),
            never,
            sm_scale,
            0.0 if delta_loc is None else float(delta_loc[r]),
            slots.numel(),
            logits_soft_cap,
            bias,
            cast,
        )
        c = c + own
        rho = value_radius(old_v, v_dim) * abs(v_scale)
        rho = torch.where(never, float("inf"), rho)
        acc[r] = accumulate(z, c, v, rho, sinks)
        # Around 0, as in the kernel, which does not know its output before it has seen all values.
        largest = v.square().sum(dim=-1).sqrt().amax(dim=0).repeat_interleave(groups)
        known = acc[r, :, AccField.V_RADIUS].isfinite()
        acc[r, :, AccField.V_RADIUS] = torch.where(known, largest, float("inf"))
        extended = z if sinks is None else torch.cat((z, sinks.to(torch.float64)[:, None]), dim=-1)
        total = torch.logsumexp(extended, dim=-1)
        lse[r] = total / math.log(2.0)
        weight = torch.exp(z - total[:, None])
        out[r] = torch.einsum("hs,shd->hd", weight, v.repeat_interleave(groups, dim=1))
    return out, lse, acc
