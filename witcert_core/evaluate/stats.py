"""Intervals and scores in plain torch: paired bootstrap, AUROC.

Shapes: N samples, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from witcert_core.errors import InputError

RESAMPLES = 10_000
LEVEL = 0.95
_CHUNK = 2_000_000


@dataclass(frozen=True)
class Interval:
    """A value with its bootstrap percentile interval; `count` samples it rests on."""

    value: float
    low: float
    high: float
    count: int

    def as_dict(self) -> dict[str, float | int]:
        return asdict(self)


def bootstrap(
    columns: Sequence[Tensor],
    statistic: Callable[..., Tensor],
    *,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile interval of `statistic`, samples drawn with replacement, the columns of a sample staying together.

    Args:
        columns: each [N]; sample i is the i-th entry of all of them.
        statistic: takes the columns as [R, N] and gives [R]; NaN results (a resample in which it does not exist) are
            left out.

    Raises:
        InputError: no samples, columns of unequal length, or a statistic that exists in no resample.
    """
    if not columns or columns[0].numel() == 0 or any(c.shape != columns[0].shape for c in columns):
        raise InputError(f"bootstrap needs columns of one length of at least 1, not {[len(c) for c in columns]}")
    count = columns[0].numel()
    generator = torch.Generator().manual_seed(seed)
    found = []
    step = max(1, _CHUNK // count)
    for first in range(0, resamples, step):
        drawn = torch.randint(count, (min(step, resamples - first), count), generator=generator)
        found.append(statistic(*(column.to(torch.float64)[drawn] for column in columns)))
    values = torch.cat(found)
    values = values[~values.isnan()]
    if values.numel() == 0:
        raise InputError("the statistic exists in none of the resamples")
    tail = (1 - level) / 2
    low, high = torch.quantile(values, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


def mean_interval(values: Sequence[float], **options: int | float) -> Interval:
    """Mean of the samples."""
    column = torch.tensor(list(values), dtype=torch.float64)
    low, high = bootstrap([column], lambda x: x.mean(-1), **options)  # type: ignore[arg-type]
    return Interval(float(column.mean()), low, high, column.numel())


def paired_difference(first: Sequence[float], second: Sequence[float], **options: int | float) -> Interval:
    """Mean of `first[i] - second[i]`, both scored on the same samples (Efron and Tibshirani 1993, section 8)."""
    if len(first) != len(second):
        raise InputError(f"{len(first)} and {len(second)} scores cannot be paired")
    column = torch.tensor(list(first), dtype=torch.float64) - torch.tensor(list(second), dtype=torch.float64)
    low, high = bootstrap([column], lambda x: x.mean(-1), **options)  # type: ignore[arg-type]
    return Interval(float(column.mean()), low, high, column.numel())


def ranks(x: Tensor) -> Tensor:
    """Ranks from 1, of equals their mean; x [..., N], float64 [..., N]."""
    values = x.to(torch.float64).contiguous()
    in_order, _ = values.sort(-1)
    below = torch.searchsorted(in_order, values, right=False)
    upto = torch.searchsorted(in_order, values, right=True)
    return (below + upto + 1).to(torch.float64) / 2


def spearman(x: Tensor, y: Tensor) -> Tensor:
    """Rank correlation (Spearman 1904) of x and y [..., N]; float64 [...], NaN where all of one are equal."""
    first, second = (r - r.mean(-1, keepdim=True) for r in (ranks(x), ranks(y)))
    return (first * second).sum(-1) / (first.square().sum(-1) * second.square().sum(-1)).sqrt()


def auroc(score: Tensor, positive: Tensor) -> Tensor:
    """Probability that a positive sample scores above a negative one, ties counting one half.

    By ranks (Mann and Whitney 1947). score [..., N]; positive [..., N], 1 or 0. Float64 [...], NaN where one of the
    classes is empty. An infinite score ranks above every finite one.
    """
    rank = ranks(score)
    is_positive = positive.to(torch.float64)
    positives = is_positive.sum(-1)
    negatives = score.shape[-1] - positives
    wins = (rank * is_positive).sum(-1) - positives * (positives + 1) / 2
    return torch.where((positives > 0) & (negatives > 0), wins / (positives * negatives), float("nan"))


def auroc_interval(score: Sequence[float], positive: Sequence[bool], **options: int | float) -> Interval | None:
    """AUROC with its bootstrap interval; None where one of the classes is empty."""
    scores = torch.tensor(list(score), dtype=torch.float64)
    labels = torch.tensor([float(p) for p in positive], dtype=torch.float64)
    if scores.numel() == 0 or labels.min() == labels.max():
        return None
    low, high = bootstrap([scores, labels], auroc, **options)  # type: ignore[arg-type]
    return Interval(float(auroc(scores, labels)), low, high, scores.numel())
