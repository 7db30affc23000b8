"""What kernels take of a pass, and cells of their accumulators: float32 sums, outputs in the engine's own dtype."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from witcert_core.cells import Terms, weight_underflow
from witcert_core.kernels.certify import Certificate
from witcert_core.kernels.common.pages import PageTable
from witcert_core.layout import AccField
from witcert_core.meter import CellBatch, cell_batch
from witcert_core.serving.rows import MeteredRow

NORM_DOWN = {torch.float32: 1.0 - 2.0**-11, torch.float16: 1.0 - 2.0**-8, torch.bfloat16: 1.0 - 2.0**-6}
"""Covers the kernel's fp32 sums and the rounding of its output: bounds need the norm from below."""


def output_norm_down(out: Tensor) -> Tensor:
    """Float32 [...] of out [..., Dv], not above the norm of what the weights and values give in real arithmetic."""
    return out.float().square().sum(-1).sqrt() * NORM_DOWN[out.dtype]


def visible_tokens(rows: Sequence[MeteredRow], window_left: int) -> list[int]:
    """How many tokens each row sees; window_left negative for no window."""
    seen = [row.position + 1 for row in rows]
    return seen if window_left < 0 else [min(n, window_left + 1) for n in seen]


def token_pages(slots: Sequence[Tensor], device: str | torch.device) -> tuple[PageTable, int]:
    """Pages of one token each, whatever the engine's page size: a slot is a page. And the longest request's length.

    slots[i] [S_i]: those of request i in order of position.
    """
    lengths = torch.tensor([0, *(s.numel() for s in slots)])
    flat = torch.cat(list(slots)) if slots else torch.zeros(0)
    indptr, last = lengths.cumsum(0).to(torch.int32), torch.ones(len(slots), dtype=torch.int32)
    return PageTable(indptr.to(device), flat.to(device, torch.int32), last.to(device)), int(lengths.max())


def kernel_cells(
    acc: Tensor,
    norm: Tensor,
    *,
    num_visible: Sequence[int],
    num_quantized: Tensor,
    delta_loc: Sequence[float],
    form: str,
    has_sink: bool,
    tv_audit: Tensor | None = None,
) -> CellBatch:
    """The cells of acc [R, H, 16] float32 and norm [R, H] from `output_norm_down`, on the host.

    num_quantized [R] or [R, H] int64: as in `CellBatch`.

    The accumulators stay float32: their rounding is that of fp32 sums (`accumulate.SUM_SLACK`). The kernel's own
    arithmetic is part of every radius already, so nothing is added for it.
    """
    sums, below = acc.cpu(), norm.cpu().double()
    none = torch.zeros_like(below)
    terms = Terms(sums, none, below, none, below, none, none)
    visible = torch.tensor(list(num_visible), dtype=torch.int64)
    quantized = (num_quantized[:, None] if num_quantized.dim() == 1 else num_quantized).cpu().expand_as(below)
    spent = torch.tensor(list(delta_loc), dtype=torch.float64)
    return cell_batch(terms, form, has_sink, visible, quantized, tv_audit, spent)


def certified_cells(
    found: Certificate,
    norm: Tensor,
    *,
    num_visible: Sequence[int],
    num_quantized: Tensor,
    delta_loc: Sequence[float],
    form: str,
    has_sink: bool,
    dtypes: Sequence[torch.dtype],
    tv_audit: Tensor | None = None,
) -> CellBatch:
    """The cells of what `certify` found of weights that another kernel, the engine's, attended with.

    norm [R, H] is that of the engine's output, from `output_norm_down`; num_quantized [R, H] as in `CellBatch`. The
    engine's weights lie within ``tanh(omega / 2)`` of those the accumulators are of, float16 weights further
    (`weight_underflow` of `dtypes`); the output that belongs to the accumulators is then as much times the largest
    value's norm from the engine's.
    """
    sums, below = found.acc.cpu(), norm.cpu().double()
    extra = (torch.tanh(0.5 * found.omega.cpu().double()) * (1.0 + 2.0**-20)).nan_to_num(nan=1.0)
    lost = [weight_underflow(seen, *dtypes) for seen in num_visible]
    extra = (extra + torch.tensor(lost, dtype=torch.float64)[:, None]).clamp(max=1.0)
    apart = 2.0 * extra * sums[..., AccField.V_RADIUS].double()
    centre = (below - apart * (1.0 + 2.0**-36)).nan_to_num(nan=0.0).clamp(min=0.0)
    none = torch.zeros_like(below)
    terms = Terms(sums, extra, below, none, centre, none, none)
    visible = torch.tensor(list(num_visible), dtype=torch.int64)
    spent = torch.tensor(list(delta_loc), dtype=torch.float64)
    return cell_batch(terms, form, has_sink, visible, num_quantized.cpu(), tv_audit, spent)


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
