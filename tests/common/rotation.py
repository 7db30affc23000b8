"""The rotation of models in float64, from its formula: what an engine's own table is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.quantizers.rotary import RotarySpec


def inv_freq(spec: RotarySpec) -> Tensor:
    """Angular frequencies ``10000^(-2i / rotary_dim)``, float64 ``[n_pairs]``."""
    return torch.pow(10000.0, -2.0 * torch.arange(spec.n_pairs, dtype=torch.float64) / max(spec.dim, 1))


def rotate(spec: RotarySpec, x: Tensor, positions: Tensor) -> Tensor:
    """Every pair of ``x [N, H, D]`` turned by ``positions [N]`` times its frequency."""
    angle = (positions.to(torch.float64)[:, None] * inv_freq(spec))[:, None]
    first, second = spec.pair_channels().unbind(-1)
    a, b = x[..., first].to(torch.float64), x[..., second].to(torch.float64)
    out = x.clone()
    out[..., first] = (a * angle.cos() - b * angle.sin()).to(x.dtype)
    out[..., second] = (a * angle.sin() + b * angle.cos()).to(x.dtype)
    return out
