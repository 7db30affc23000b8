"""The certificate over a pool and its witness in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from witcert_core.cache.bands import BandMap
from witcert_core.cache.norm_codes import decode_norm
from witcert_core.cache.radii import radius_dither, radius_witness
from witcert_core.kernels.decode.reference import product_radii, softmax_error
from witcert_core.kernels.host.pages import PageTable, gather
from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.sums import NUM_ACC_FIELDS, AccField, accumulate


def certify_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    witness: Tensor,
    value_witness: Tensor | None,
    table: PageTable,
    bands: BandMap,
    rows: Sequence[tuple[int, int]],
    spec: AttentionSpec,
    engine_constant: float,
    steps: Tensor | None,
    delta_loc: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accumulators ``[R, H, 16]``, ``omega [R, H]`` and base-2 lse ``[R, H]``, float64.

    ``rows``: (request, position) of each query of ``q [R, H, D]``; a row sees the tokens up to its position.
    """
    num_rows, heads = q.shape[:2]
    acc = torch.full((num_rows, heads, NUM_ACC_FIELDS), float("inf"), dtype=torch.float64)
    omega = torch.full((num_rows, heads), float("inf"), dtype=torch.float64)
    lse = torch.full((num_rows, heads), float("-inf"), dtype=torch.float64)
    for r, (request, position) in enumerate(rows):
        if position < 0:
            continue
        slots = spec.visible(table.slots(request, position + 1, k.shape[1]))
        row, keys = q[r].to(torch.float64), gather(k, slots).to(torch.float64)
        groups = heads // keys.shape[1]
        z = spec.logits(row, keys)
        own, engine = (x + softmax_error(spec) for x in product_radii(row, keys, spec))
        c = radius_witness(row, gather(witness, slots), bands, spec.sm_scale) + own
        if steps is not None:
            delta = 0.0 if delta_loc is None else float(delta_loc[r])
            known = gather(steps, slots)
            known = torch.where(known >= 0, known, float("inf"))
            c = c + radius_dither(row, known, spec.sm_scale, delta, slots.numel())
        values = rho = None
        if value_witness is not None:
            values = gather(v, slots).to(torch.float64)
            rho = decode_norm(gather(value_witness, slots)[..., 0])
        acc[r] = accumulate(z, c, values, rho, spec.sinks)
        if values is not None:
            largest = values.norm(dim=-1).amax(dim=0).repeat_interleave(groups)
            known = acc[r, :, AccField.V_RADIUS].isfinite()
            acc[r, :, AccField.V_RADIUS] = torch.where(known, largest, float("inf"))
        omega[r] = (own + engine + engine_constant).amax(dim=-1)
        extended = z if spec.sinks is None else torch.cat((z, spec.sinks.to(torch.float64)[:, None]), dim=-1)
        lse[r] = torch.logsumexp(extended, dim=-1) / math.log(2.0)
    return acc, omega, lse
