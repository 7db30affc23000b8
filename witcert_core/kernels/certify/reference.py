"""The certificate over a pool and its witness in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from witcert_core.cache.bands import BandMap
from witcert_core.cache.norm_codes import decode_norm
from witcert_core.cache.radii import radius_dither, radius_witness
from witcert_core.kernels.host import slack
from witcert_core.kernels.host.pages import PageTable, gather
from witcert_core.meter.sums import NUM_ACC_FIELDS, AccField, accumulate
from witcert_core.meter.tv import attention_logits


def certify_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    witness: Tensor,
    value_witness: Tensor | None,
    table: PageTable,
    bands: BandMap,
    rows: Sequence[tuple[int, int]],
    *,
    sm_scale: float,
    v_scale: float = 1.0,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    engine_constant: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    steps: Tensor | None = None,
    delta_loc: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accumulators ``[R, H, 16]``, ``omega [R, H]`` and base-2 lse ``[R, H]``, float64.

    ``rows``: (request, position) of each query; a row sees the tokens up to its position.
    """
    num_rows, heads, head_dim = q.shape
    acc = torch.full((num_rows, heads, NUM_ACC_FIELDS), float("inf"), dtype=torch.float64)
    omega = torch.full((num_rows, heads), float("inf"), dtype=torch.float64)
    lse = torch.full((num_rows, heads), float("-inf"), dtype=torch.float64)
    for r, (request, position) in enumerate(rows):
        if position < 0:
            continue
        first = max(position - window_left, 0) if window_left >= 0 else 0
        slots = table.slots(request, position + 1, k.shape[1])[first:]
        row, keys = q[r].to(torch.float64), gather(k, slots).to(torch.float64)
        groups = heads // keys.shape[1]
        z = attention_logits(row, keys, sm_scale, logits_soft_cap)
        norms = row.norm(dim=-1)[:, None] * keys.norm(dim=-1).T.repeat_interleave(groups, dim=0)
        dot = norms * (abs(sm_scale) * slack.dot_error(head_dim))
        extra = torch.full_like(z, slack.SOFTMAX + max(logits_soft_cap, 0.0) * slack.SOFTCAP)
        if alibi_slopes is not None:
            distance = torch.arange(first, position + 1, dtype=torch.float64) - position
            bias = alibi_slopes.to(torch.float64)[:, None] * distance
            z = z + bias
            extra = extra + bias.abs() * slack.BIAS
        c = radius_witness(row, gather(witness, slots), bands, sm_scale) + dot + extra
        if steps is not None:
            delta = 0.0 if delta_loc is None else float(delta_loc[r])
            known = gather(steps, slots)
            known = torch.where(known >= 0, known, float("inf"))
            c = c + radius_dither(row, known, sm_scale, delta, slots.numel())
        values = rho = None
        if v is not None and value_witness is not None:
            values = gather(v, slots).to(torch.float64) * v_scale
            rho = decode_norm(gather(value_witness, slots)[..., 0]) * abs(v_scale)
        acc[r] = accumulate(z, c, values, rho, sinks)
        if values is not None:
            largest = values.norm(dim=-1).amax(dim=0).repeat_interleave(groups)
            known = acc[r, :, AccField.V_RADIUS].isfinite()
            acc[r, :, AccField.V_RADIUS] = torch.where(known, largest, float("inf"))
        omega[r] = (2.0 * (dot + extra) + engine_constant).amax(dim=-1)
        extended = z if sinks is None else torch.cat((z, sinks.to(torch.float64)[:, None]), dim=-1)
        lse[r] = torch.logsumexp(extended, dim=-1) / math.log(2.0)
    return acc, omega, lse
