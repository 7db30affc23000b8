"""Levels of a non-uniform quantizer: k-means in one dimension, for many heads at once."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_ROUNDS = 50


def fit_levels(samples: Tensor, count: int) -> Tensor:
    """Levels float32 [H, count], rising, that lower the squared error of samples [H, S] to a local minimum.

    Lloyd's algorithm from quantiles: cells are cut at the midpoints of the levels, levels move to the means of their
    cells. NaN among the samples is left out; an empty cell keeps its level. A head whose samples are not finite, or
    none, gets NaN levels, so that nothing it stores is taken for known.
    """
    ordered = samples.to(torch.float64).sort(-1).values  # NaN last
    sizes = (~ordered.isnan()).sum(-1, keepdim=True)
    total = torch.nn.functional.pad(ordered.nan_to_num(0.0).cumsum(-1), (1, 0))
    quantiles = (torch.arange(count, dtype=torch.float64, device=samples.device) + 0.5) / count
    start = (quantiles * (sizes - 1).clamp(min=0)).round().long()
    levels = ordered.gather(-1, start)
    for _ in range(MAX_ROUNDS):
        middles = ((levels[:, 1:] + levels[:, :-1]) / 2).contiguous()
        cuts = torch.minimum(torch.searchsorted(ordered.nan_to_num(float("inf")), middles), sizes)
        ends = torch.cat([torch.zeros_like(sizes), cuts, sizes], -1)
        held = ends[:, 1:] - ends[:, :-1]
        means = (total.gather(-1, ends[:, 1:]) - total.gather(-1, ends[:, :-1])) / held.clamp(min=1)
        new = torch.where(held > 0, means, levels)
        if torch.equal(new, levels):
            break
        levels = new
    return levels.float()
