"""Radii: for each token an upper bound on how far its logit can have moved.

All take queries of ``H`` heads against the ``Hkv`` heads of the cache (``H = G * Hkv``, query head ``h``
reads KV head ``h // G``), compute in float64 and round up. An unknown residual (code 255, infinite
scale, NaN) gives an infinite radius.

Channels kept exactly beside a quantized cache (an outlier bypass) have no error: pass ``q`` with 0 in them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.cache.bands import BandMap, group_map
from witcert_core.cache.norm_codes import decode_norm
from witcert_core.errors import BudgetError, InputError
from witcert_core.meter.contraction import SUM_UP, contract_up
from witcert_core.quantizers.dither import GRID_BITS, GROUP, HALF_STEP_MARGIN, decode_group_witness


def radius_witness(q: Tensor, codes: Tensor, bands: BandMap, sm_scale: float) -> Tensor:
    """The deterministic tier: ``c = |sm_scale| * sum_b ||q_b|| w_b``; deterministic, for any quantizer and any query.

    Args:
        q: ``[H, D]`` query, after RoPE.
        codes: uint8 ``[S, Hkv, B]`` stored witnesses.
        bands: the partition the witnesses were taken with.

    Returns:
        float64 ``[H, S]``.
    """
    if codes.shape[-1] != bands.num_bands:
        raise InputError(f"witness has {codes.shape[-1]} bands; this band map has {bands.num_bands}")
    return contract_up(bands.norms(q), decode_norm(codes), sm_scale)


def radius_group_witness(q: Tensor, scales: Tensor, codes: Tensor, sm_scale: float, group: int = GROUP) -> Tensor:
    """The deterministic tier for the INT8 cache with a stored group witness (276-byte layout).

    Args:
        q: ``[H, D]``.
        scales: fp16 ``[S, Hkv, Gr]``.
        codes: uint8 ``[S, Hkv, Gr]``.

    Returns:
        float64 ``[H, S]``.
    """
    norms = group_map(q.shape[-1], group).norms(q)
    return contract_up(norms, decode_group_witness(codes, scales, group), sm_scale)


def radius_dither(
    q: Tensor, scales: Tensor, sm_scale: float, delta_loc: float, num_visible: int, group: int = GROUP
) -> Tensor:
    """The probabilistic tier: the smaller of the half-step radius and the sub-Gaussian one.

    ``|sm_scale| * sum_g s_g ||q_g||_1 / 2 * (1 + 2^-15)`` holds always. With ``delta_loc > 0``,
    ``sqrt(2 ln(2 S / delta_loc)) * sigma + |sm_scale| * sum_g s_g ||q_g||_1 (2^-(n+1) + 2^-16)`` with
    ``sigma^2 = sm_scale^2 * sum_g s_g^2 (1 - 4^-n)/12 * ||q_g||^2`` holds for all ``S`` tokens of the cell
    at once with probability ``1 - delta_loc``, for queries that do not depend on the dither.

    Args:
        q: ``[H, D]``.
        scales: fp16 ``[S, Hkv, Gr]``.
        delta_loc: probability this cell may spend; 0 gives the deterministic radius alone.
        num_visible: tokens in the union, at least those given. Only tokens made exact by a rule fixed
            before their row was drawn may be left out; repaired tokens must be counted.

    Returns:
        float64 ``[H, S]``.
    """
    return dither_law(q, scales, sm_scale, group).radius(delta_loc, num_visible)


@dataclass(frozen=True)
class DitherLaw:
    """What the dither says of each logit's error, float64 ``[H, S]``: ``|eps| <= bias + |e|`` with ``e`` centred.

    Args:
        sigma: root of the sub-Gaussian proxy of ``e``.
        bias: certain part, the grid's mean and the evaluation in fp32.
        certain: radius that holds whatever was drawn.
    """

    sigma: Tensor
    bias: Tensor
    certain: Tensor

    def radius(self, delta_loc: float, num_visible: int) -> Tensor:
        """Float64 ``[H, S]``: the smaller of `certain` and what holds for all of `num_visible` tokens at once with
        probability ``1 - delta_loc``."""
        if not 0.0 <= delta_loc < 1.0:
            raise BudgetError(f"delta_loc is {delta_loc}; it must lie in [0, 1), 0 for the deterministic radius")
        if delta_loc == 0.0:
            return self.certain
        if num_visible < 1:
            raise InputError(f"num_visible is {num_visible}; a cell sees at least one token")
        tail = math.sqrt(2.0 * math.log(2.0 * num_visible / delta_loc)) * SUM_UP
        return torch.minimum(self.certain, tail * self.sigma + self.bias)


def dither_law(q: Tensor, scales: Tensor, sm_scale: float, group: int = GROUP) -> DitherLaw:
    """The law of `radius_dither`, for ``q [H, D]`` and fp16 ``scales [S, Hkv, Gr]``."""
    bands = group_map(q.shape[-1], group)
    s = scales.to(torch.float64)
    q64 = q.to(torch.float64)
    abs_sum = torch.zeros(*q.shape[:-1], bands.num_bands, dtype=torch.float64, device=q.device)
    abs_sum = abs_sum.index_add(-1, bands.channel_band.to(q.device), q64.abs())
    l1 = contract_up(abs_sum, s, sm_scale)
    proxy = (1.0 - 4.0**-GRID_BITS) / 12.0
    return DitherLaw(
        sigma=(contract_up(bands.norms(q64).square(), s.square(), 1.0) * proxy).sqrt() * abs(sm_scale),
        bias=l1 * (2.0 ** -(GRID_BITS + 1) + 2.0**-16),
        certain=0.5 * l1 * HALF_STEP_MARGIN,
    )
