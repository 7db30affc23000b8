"""What kernels take of a pass, and cells of their accumulators: float32 sums, outputs in the engine's own dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from witcert_core.kernels.certify import Certificate
from witcert_core.kernels.host.pages import PageTable
from witcert_core.meter.audit import Audit
from witcert_core.meter.cells import CellBatch, Terms, value_sizes
from witcert_core.meter.kernel_error import KernelArithmetic, lost_weight, odds_moved, output_error
from witcert_core.meter.measure import cell_batch
from witcert_core.meter.sums import AccField
from witcert_core.serving.passes import MeteredRow

NORM_SLACK = 2.0**-16
"""Relative error of a norm of up to 2^11 channels taken in float32."""


def output_norm(out: Tensor) -> Tensor:
    """Float32 [...] norms of the outputs [..., Dv] that a kernel handed on, off by at most `NORM_SLACK`."""
    return out.float().square().sum(-1).sqrt()


def visible_tokens(rows: Sequence[MeteredRow], window_left: int) -> list[int]:
    """How many tokens each row sees; window_left negative for no window."""
    seen = [row.position + 1 for row in rows]
    return seen if window_left < 0 else [min(n, window_left + 1) for n in seen]


def token_pages(slots: Sequence[Tensor], device: str | torch.device, page_size: int = 1) -> tuple[PageTable, int]:
    """The pages of requests, of `page_size` slots each, and the longest request's length.

    slots[i] [S_i]: those of request i in order of position, whole pages but the last one. With pages of one slot they
    may lie anywhere, whatever the engine's own page size.
    """
    lengths = [mine.numel() for mine in slots]
    counts = torch.tensor([0, *(-(-length // page_size) for length in lengths)])
    last = torch.tensor([(length - 1) % page_size + 1 for length in lengths], dtype=torch.int32)
    flat = torch.cat([mine[::page_size] for mine in slots]) if slots else torch.zeros(0, dtype=torch.int64)
    indptr = counts.cumsum(0).to(torch.int32)
    pages = (flat // page_size).to(device, torch.int32)
    return PageTable(indptr.to(device), pages, last.to(device)), max(lengths, default=0)


def kernel_cells(
    acc: Tensor,
    norm: Tensor,
    *,
    num_visible: Sequence[int],
    num_quantized: Tensor,
    delta_loc: Sequence[float],
    form: str,
    has_sink: bool,
    v_dim: int,
    arithmetic: KernelArithmetic,
    audit: Audit | None = None,
) -> CellBatch:
    """The cells of acc [R, H, 16] float32 and norm [R, H] of `output_norm`, on the host.

    num_quantized [R] or [R, H] int64: as in `CellBatch`.

    The accumulators stay float32: their rounding is that of fp32 sums (`accumulate.SUM_SLACK`). They are of the weights
    that the kernel computed, and each radius holds how it computed them; `arithmetic` is what it did with them then.
    """
    extra = torch.full(norm.shape, math.tanh(0.5 * arithmetic.cast_radius) * (1.0 + 2.0**-36), dtype=torch.float64)
    quantized = (num_quantized[:, None] if num_quantized.dim() == 1 else num_quantized).expand(norm.shape)
    return _cells(acc, norm, extra, num_visible, quantized, delta_loc, form, has_sink, v_dim, arithmetic, audit)


def certified_cells(
    found: Certificate,
    norm: Tensor,
    *,
    num_visible: Sequence[int],
    num_quantized: Tensor,
    delta_loc: Sequence[float],
    form: str,
    has_sink: bool,
    v_dim: int,
    arithmetic: KernelArithmetic,
    audit: Audit | None = None,
) -> CellBatch:
    """The cells of what `certify` found of weights that another kernel, the engine's, attended with.

    norm [R, H] is that of the engine's output, of `output_norm`; num_quantized [R, H] as in `CellBatch`; arithmetic is
    the engine's, and was given to `certify` as well. The engine's weights lie within ``tanh(omega / 2)`` of those the
    accumulators are of.
    """
    omega = found.omega.cpu().double() * (1.0 + 2.0**-20)
    extra = odds_moved(omega, torch.tensor(list(num_visible), dtype=torch.float64)[:, None]).nan_to_num(nan=1.0)
    return _cells(
        found.acc, norm, extra, num_visible, num_quantized, delta_loc, form, has_sink, v_dim, arithmetic, audit
    )


def _cells(
    acc: Tensor,
    norm: Tensor,
    extra: Tensor,
    num_visible: Sequence[int],
    num_quantized: Tensor,
    delta_loc: Sequence[float],
    form: str,
    has_sink: bool,
    v_dim: int,
    arithmetic: KernelArithmetic,
    audit: Audit | None,
) -> CellBatch:
    """extra [R, H]: TV between the accumulators' weights and those that met V, but for what float16 lost.

    Bounds need the norm of the accumulators' output from below; only what was handed on is known, which is at most
    `output_error` from it. That itself needs the norm from above, which no mean of values passes.
    """
    sums = acc.cpu()
    visible = torch.tensor(list(num_visible), dtype=torch.int64)
    seen = visible.double()[:, None]
    extra = (extra + lost_weight(seen, arithmetic)).clamp(max=1.0)
    handed_on = norm.cpu().double()
    most = value_sizes(sums, torch.zeros_like(handed_on), has_sink)["mean_norm"]
    for _ in range(2):  # the second time with what the first said of the norm
        sizes = value_sizes(sums, most, has_sink)
        error = output_error(extra, **sizes, num_tokens=seen, v_dim=v_dim, arithmetic=arithmetic)
        most = torch.minimum(most, handed_on * (1.0 + NORM_SLACK) + error)
    below = (handed_on * (1.0 - NORM_SLACK) - error).nan_to_num(nan=0.0).clamp(min=0.0)
    none = torch.zeros_like(below)
    unknown = torch.full_like(below, float("inf"))  # directions: sums do not tell them
    terms = Terms(sums, extra, below, none, below, none, none, sums[..., AccField.V2].double(), unknown, error)
    spent = torch.tensor(list(delta_loc), dtype=torch.float64)
    return cell_batch(terms, form, has_sink, visible, num_quantized.cpu(), audit, spent)


def quantized_tokens(exact: Tensor, requests: Sequence[Tensor], rows: Sequence[MeteredRow], window_left: int) -> Tensor:
    """int64 [R, Hkv]: of the tokens each row sees, those that are not exact.

    exact bool [M, Hkv]: of all tokens of the `requests` [S_i], one request after the other.
    """
    first = [0, *accumulate(slots.numel() for slots in requests)]
    before = torch.nn.functional.pad((~exact).cumsum(0), (0, 0, 1, 0))  # how many there are before each token
    ends = [first[row.request] + row.position + 1 for row in rows]
    starts = [end - seen for end, seen in zip(ends, visible_tokens(rows, window_left), strict=True)]
    return before[ends] - before[starts]


def spend_down(delta_loc: Sequence[float], device: torch.device) -> Tensor:
    """Failure probabilities as the float32 [R] kernels take, never above what may be spent."""
    exact = torch.tensor(list(delta_loc), dtype=torch.float64)
    single = exact.to(torch.float32)
    lower = torch.nextafter(single, torch.zeros_like(single))
    return torch.where(single.to(torch.float64) > exact, lower, single).to(device)
