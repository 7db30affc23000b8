"""From logits and radii of some cells to their bounds: the one place where sums become a meter.

Shapes: C cells (query heads of a row, or of several rows), S tokens, Hkv KV heads, D and Dv channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from witcert_core.meter import directional
from witcert_core.meter.bounds import FORM_NAMES, FORMS, extremal, meter
from witcert_core.meter.kernel_error import KernelArithmetic, attention_error, output_error, weight_error
from witcert_core.meter.output import output_bound
from witcert_core.meter.sums import NUM_ACC_FIELDS, AccField, attention_sums, weighted_values
from witcert_core.meter.tv import softmax_with_sink, total_variation

TV_UP, TV_LEAST = 1.0 + 2.0**-36, 2.0**-36
"""Outward rounding of a computed TV in float64: relative, and for what the weights themselves lose."""


@dataclass(frozen=True)
class Terms:
    """What is summed over the tokens of each cell; leading dimensions are free, so terms of rows can be stacked.

    Args:
        acc: ``[..., 16]`` accumulators.
        kernel_tv: ``[...]`` bound on the TV between these weights and those of the kernel that attended.
        norm: ``[...]`` ``||o~||``.
        extremal_tv: ``[...]`` the ``extremal`` bound if asked for, else 0.
        centre_norm: ``[...]`` norm of the output that the accumulators belong to: ``norm``, or that of the corrected
            keys and values.
        sketch_tv: ``[...]`` TV between the corrected weights and the stored keys'; 0 without a sketch.
        sketch_out: ``[...]`` what the correction moves the output by; 0 without a sketch.
        value_spread: ``[...]`` mean square distance of the values from the centre of ``V_RADIUS``, at least.
        directional_out: ``[...]`` the output bound of `directional.moved`; infinite where sums are all there is.
        kernel_out: ``[...]`` distance of what the kernel hands on from real arithmetic over what is stored.
    """

    acc: Tensor
    kernel_tv: Tensor
    norm: Tensor
    extremal_tv: Tensor
    centre_norm: Tensor
    sketch_tv: Tensor
    sketch_out: Tensor
    value_spread: Tensor
    directional_out: Tensor
    kernel_out: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Terms], of: Callable[[list[Tensor]], Tensor]) -> Terms:
        """One of several: `of` the tensors ``[...]`` that the parts have, field by field."""
        return cls(*(of([getattr(part, f.name) for part in parts]) for f in fields(cls)))

    def mapped(self, of: Callable[[Tensor], Tensor]) -> Terms:
        """`of` each field ``[...]``."""
        return Terms.joined([self], lambda same: of(same[0]))

    def of(self, cells: slice) -> Terms:
        """Those of some cells."""
        return self.mapped(lambda x: x[cells])


@dataclass(frozen=True)
class Stored:
    """What the cache holds, where `sum_terms` is given the corrected logits and values: [C, S] and [S, Hkv, Dv]."""

    logits: Tensor
    v: Tensor


def sum_terms(
    logits: Tensor,
    c: Tensor,
    omega: Tensor,
    v: Tensor,
    rho: Tensor,
    *,
    arithmetic: KernelArithmetic,
    num_tokens: Tensor | int,
    sinks: Tensor | None = None,
    form: str = "auto",
    stored: Stored | None = None,
) -> Terms:
    """Sum over S tokens. A token that a cell does not see has logit -inf, radius 0 and omega 0 there.

    Args:
        logits: ``[C, S]`` compressed logits, float64.
        c: ``[C, S]`` radii of the compression.
        omega: ``[C, S]`` radii of the kernel's own arithmetic, of `kernel_radius`.
        v: ``[S, Hkv, Dv]`` stored values, float64.
        rho: ``[S, Hkv]`` radii of the values.
        sinks: ``[C]`` learned sink logits.
        arithmetic: of the kernel that the engine attended with.
        num_tokens: ``[C]`` or for all, how many tokens a cell sees.
        stored: with a sketch, what the engine reads; ``logits``, ``v`` are then of the corrected cache, ``c`` and
            ``rho`` around it.
    """
    acc, weights, centre = attention_sums(logits, c, v, rho, sinks)
    kernel_tv = weight_error(omega, num_tokens, arithmetic)
    extremal_tv = torch.zeros_like(kernel_tv)
    if form == "extremal":
        extremal_tv = extremal.bound(weights, torch.nn.functional.pad(c, (0, int(sinks is not None))))
    norm = centre.norm(dim=-1)
    square = acc[..., AccField.V2]
    nothing = torch.zeros_like(kernel_tv)
    terms = Terms(
        acc=acc,
        kernel_tv=kernel_tv,
        norm=norm,
        extremal_tv=extremal_tv,
        centre_norm=norm,
        sketch_tv=nothing,
        sketch_out=nothing,
        value_spread=(square - norm.square()).clamp(min=0.0) + square * (TV_UP - 1.0),  # what cancels is added back
        directional_out=directional.moved(weights, c, v, rho, centre),
        kernel_out=nothing,
    )
    if stored is None:
        sizes = value_sizes(acc, norm, sinks is not None)
        error = output_error(kernel_tv, **sizes, num_tokens=num_tokens, v_dim=v.shape[-1], arithmetic=arithmetic)
        return replace(terms, kernel_out=error)
    served_weights = softmax_with_sink(stored.logits, sinks)
    served = weighted_values(served_weights[:, : logits.shape[-1]], stored.v)
    acc[..., AccField.LOG_A] = full_log_a(served_weights, stored.logits - logits, c)
    return replace(
        terms,
        norm=served.norm(dim=-1),
        sketch_tv=total_variation(weights, served_weights) * TV_UP + TV_LEAST,
        sketch_out=(centre - served).norm(dim=-1) * TV_UP,
        # The engine's own arithmetic moves weight between stored values; the accumulators know the corrected ones.
        kernel_out=attention_error(served_weights, stored.v, omega, num_tokens=num_tokens, arithmetic=arithmetic),
    )


def value_sizes(acc: Tensor, norm: Tensor, has_sink: bool) -> dict[str, Tensor]:
    """What `output_error` asks of the values, of accumulators ``[..., 16]`` and at least the norm of their output."""
    radius = acc[..., AccField.V_RADIUS].to(torch.float64)  # around 0 or around the output
    return {
        "norm": norm,
        "mean_norm": acc[..., AccField.V2].to(torch.float64).sqrt() * TV_UP,
        "max_norm": radius + norm,
        "diameter": 2.0 * (torch.maximum(radius, norm) if has_sink else radius),
    }


def full_log_a(weights: Tensor, shift: Tensor, radius: Tensor) -> Tensor:
    """``log sum p~ e^c`` [C] with the whole radius ``c = |shift - mean shift| + radius``, for ranking."""
    num_tokens = radius.shape[-1]
    moved = shift.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)  # tokens a cell does not see
    moved = (moved - (weights[:, :num_tokens] * moved).sum(-1, keepdim=True)).abs()
    total = torch.nn.functional.pad(moved + radius, (0, weights.shape[-1] - num_tokens))  # a sink has radius 0
    return torch.logsumexp(weights.log() + total, dim=-1).clamp(min=0.0)


def in_rows(parts: Sequence[Terms], rows: Sequence[int], heads: int, device: torch.device) -> Terms:
    """Terms ``[R * H, ...]`` of some rows each as one ``[ROWS, H, ...]`` in order; no row gives empty tensors.

    Args:
        rows: the numbers of the rows, part after part.
    """
    if not parts:
        empty = torch.zeros(0, heads, dtype=torch.float64, device=device)
        acc = torch.zeros(0, heads, NUM_ACC_FIELDS, dtype=torch.float64, device=device)
        return Terms(acc, *[empty] * (len(fields(Terms)) - 1))
    place = None if list(rows) == sorted(rows) else torch.tensor(rows, device=device).argsort()

    def in_order(found: list[Tensor]) -> Tensor:
        flat = found[0] if len(found) == 1 else torch.cat(found)
        by_row = flat.reshape(len(rows), heads, *flat.shape[1:])
        return by_row if place is None else by_row.index_select(0, place)

    return Terms.joined(parts, in_order)


@dataclass(frozen=True)
class Bounds:
    """Of cells ``[...]``: ``floor <= TV <= meter`` in [0, 1], the deciding form's index, ``||o - o~|| <= out``."""

    meter: Tensor
    floor: Tensor
    form: Tensor
    out: Tensor


def bounds_of(terms: Terms, form: str, has_sink: bool) -> Bounds:
    """What the terms of cells say.

    With p^ the weights of the corrected cache, p~ of the stored one: ``TV(p^, p~)`` is known, so TV is within
    ``TV(p, p^)``, which is bounded, and the engine's own arithmetic of it, on either side.
    """
    if form == "auto":
        tv, which = meter(terms.acc)
    else:
        tv = (terms.extremal_tv if form == "extremal" else FORMS[form](terms.acc)).clamp(max=1.0)
        which = torch.full_like(tv, FORM_NAMES.index(form), dtype=torch.int64)
    out = output_bound(terms.acc, tv, terms.centre_norm, has_sink, terms.value_spread, terms.directional_out)
    out = out + terms.sketch_out + terms.kernel_out
    either_side = tv + terms.kernel_tv
    above = (terms.sketch_tv + either_side).clamp(max=1.0).nan_to_num(nan=1.0)
    # `sketch_tv` was rounded up twice, by its factor and its summand.
    below = terms.sketch_tv * (1.0 - 4.0 * (TV_UP - 1.0)) - 2.0 * TV_LEAST - either_side
    out = out.nan_to_num(nan=float("inf"), posinf=float("inf"))
    return Bounds(above, below.clamp(min=0.0).nan_to_num(nan=0.0), which, out)


@dataclass(frozen=True)
class CellBatch:
    """Cells of ``R`` query rows and ``H`` query heads in one layer, on the host.

    Args:
        acc: ``[R, H, 16]`` float64 accumulators.
        meter: ``[R, H]`` bound on TV, in [0, 1]; 1 where unknown.
        form: ``[R, H]`` int64, index in ``FORM_NAMES`` of the deciding form.
        log_a: ``[R, H]`` unclipped ``log sum p~ e^c``; infinite if a radius is.
        out_bound: ``[R, H]`` absolute bound on ``||o - o~||``; infinite if unknown, never NaN.
        out_norm: ``[R, H]`` ``||o~||``.
        num_visible: ``[R]`` int64, tokens seen.
        num_quantized: ``[R, H]`` int64, those among them that are not known to be read exactly, keys and values alike.
            0: an *exact* cell, in which nothing differs, so nothing is certified either.
        tv_audit: ``[R, H]`` true TV where audited and NaN elsewhere, or ``None`` when no row was.
        delta_loc: ``[R]`` float64 failure probability spent per cell, 0 for the deterministic tier.
        floor: ``[R, H]`` TV is at least this; 0 where the residuals have no sketch.
        excess: ``[R, H]`` how much further the engine's output is from attention over what is stored than its kernel's
            rounding may take it, NaN where not audited, or ``None``. Above 0 the bound is of other weights than served.

    Example:
        >>> import torch, witcert_core as wc
        >>> @wc.hookimpl
        ... def witcert_on_cell(event):
        ...     cells: wc.CellBatch = event.cells
        ...     print(f"{int((cells.meter[event.row] <= 0.2).sum())} of {cells.num_heads} heads within 0.2")
    """

    acc: Tensor
    meter: Tensor
    form: Tensor
    log_a: Tensor
    out_bound: Tensor
    out_norm: Tensor
    num_visible: Tensor
    num_quantized: Tensor
    tv_audit: Tensor | None
    delta_loc: Tensor
    floor: Tensor
    excess: Tensor | None = None
