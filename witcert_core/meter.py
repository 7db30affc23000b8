"""Measure cells: bound what compression can have done to each query row and head of one layer.

Reference path, float64, one row at a time. The kernels produce the same accumulators on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from witcert_core.bounds import FORM_NAMES
from witcert_core.cells import Stored, Terms, bounds_of, kernel_radius, stack_terms, sum_terms, weight_underflow
from witcert_core.errors import InputError
from witcert_core.layout import AccField
from witcert_core.tv import attention_logits, softmax_with_sink, total_variation


@dataclass(frozen=True)
class CellBatch:
    """Cells of ``R`` query rows and ``H`` query heads in one layer.

    Args:
        acc: ``[R, H, 16]`` float64 accumulators.
        meter: ``[R, H]`` bound on TV, in [0, 1]; 1 where unknown.
        form: ``[R, H]`` int64, index in ``FORM_NAMES`` of the deciding form.
        log_a: ``[R, H]`` unclipped ``log sum p~ e^c``; infinite if a radius is.
        out_bound: ``[R, H]`` absolute bound on ``||o - o~||``; infinite if unknown, never NaN.
        out_norm: ``[R, H]`` ``||o~||``.
        num_visible: ``[R]`` int64, tokens seen.
        tv_audit: ``[R, H]`` true TV where audited and NaN elsewhere, or ``None`` when no row was.
        delta_loc: ``[R]`` float64 failure probability spent per cell, 0 for tier W.
        floor: ``[R, H]`` TV is at least this; 0 where the residuals have no sketch.
    """

    acc: Tensor
    meter: Tensor
    form: Tensor
    log_a: Tensor
    out_bound: Tensor
    out_norm: Tensor
    num_visible: Tensor
    tv_audit: Tensor | None
    delta_loc: Tensor
    floor: Tensor


class Radii(Protocol):
    """Radii of the tokens in the cache slots of one layer."""

    def key_radius(self, q: Tensor, slots: Tensor, sm_scale: float, delta_loc: float) -> Tensor:
        """Bound on each logit's error, float64 ``[H, S]``, for ``q [H, D]`` float64 and ``slots [S]``."""
        ...

    def value_radius(self, slots: Tensor) -> Tensor:
        """Float64 ``[S, Hkv]`` bound on ``||v~ - v||``."""
        ...

    def residuals(self, slots: Tensor) -> tuple[Tensor, Tensor] | None:
        """Estimates of ``k~ - k`` ``[S, Hkv, D]`` and ``v~ - v`` ``[S, Hkv, Dv]``, or None.

        With them the radii are around the corrected cache, not around the stored one.
        """
        ...


def measure(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    radii: Radii,
    sm_scale: float,
    delta_loc: Sequence[float],
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: Tensor | None = None,
    form: str = "auto",
    fused: bool = False,
    exact_k: Tensor | None = None,
    audit_rows: Tensor | None = None,
) -> CellBatch:
    """Meter ``R`` query rows of one layer.

    The weights are recomputed in float64 from the stored keys. When the engine's own kernel produced the
    output (``fused=False``) its weights lie within ``tanh(max omega / 2)`` of those, ``omega`` being the
    kernel's fp32 arithmetic, and that is added; with ``fused=True`` ``omega`` is part of each radius.

    Args:
        q: ``[R, H, D]`` queries as attention uses them.
        k_cache: ``[SLOTS, Hkv, D]`` keys as the kernel reads them.
        v_cache: ``[SLOTS, Hkv, Dv]`` values as the kernel reads them.
        kv_indptr: int ``[R + 1]``, row ``r`` sees ``kv_indices[kv_indptr[r]:kv_indptr[r + 1]]``.
        kv_indices: int slots of the visible tokens in order of position, causality already applied.
        radii: bounds for this layer's slots.
        sm_scale: softmax scale.
        delta_loc: per row, probability each of its cells may spend (0: tier W).
        logits_soft_cap: 0 for none.
        window_left: a row sees its own token and this many before it; negative for no window.
        sinks: ``[H]`` learned sink logits.
        form: ``auto`` (the meter), or one name of ``FORM_NAMES``.
        fused: the weights come from a kernel of this package.
        exact_k: ``[SLOTS, Hkv, D]`` exact keys, for audits.
        audit_rows: bool ``[R]``, rows whose true TV is computed.

    Raises:
        InputError: shapes that do not fit, a row that sees nothing, an unknown form, an audit without keys.
    """
    _check(q, k_cache, v_cache, kv_indptr, kv_indices, delta_loc, form, exact_k, audit_rows)
    bounds = kv_indptr.tolist()
    num_rows, heads = q.shape[0], q.shape[1]
    device = q.device
    parts: list[Terms] = []
    visible = torch.empty(num_rows, dtype=torch.int64, device=device)
    audited = audit_rows.tolist() if audit_rows is not None else [False] * num_rows
    truth = None
    if any(audited):
        truth = torch.full((num_rows, heads), float("nan"), dtype=torch.float64, device=device)
    scale = abs(sm_scale)
    sixteen_bit = k_cache.element_size() <= 2 or q.element_size() <= 2

    for r in range(num_rows):
        slots = kv_indices[bounds[r] : bounds[r + 1]].to(torch.int64)
        if window_left >= 0:
            slots = slots[-(window_left + 1) :]
        if slots.numel() == 0:
            raise InputError(f"row {r} sees no token; leave padded rows out of the batch")
        visible[r] = slots.numel()
        k, row = k_cache.index_select(0, slots), q[r].to(torch.float64)
        v = v_cache.index_select(0, slots).to(torch.float64)
        logits, v, stored = centred(row, k, v, radii.residuals(slots), sm_scale, logits_soft_cap)
        c = radii.key_radius(row, slots, scale, float(delta_loc[r])).to(torch.float64)
        omega = kernel_radius(row, k, scale, logits_soft_cap, sixteen_bit)
        rho = radii.value_radius(slots)
        lost = 0.0 if fused else weight_underflow(slots.numel(), k_cache.dtype, q.dtype)
        terms = sum_terms(
            logits, c, omega, v, rho, sinks=sinks, form=form, fused=fused, underflow=lost, stored=stored
        )
        parts.append(terms)
        if truth is not None and audited[r] and exact_k is not None:
            truth[r] = true_tv(q[r], k, exact_k[slots], sm_scale, logits_soft_cap, sinks)

    stacked = stack_terms(parts, num_rows, heads, device)
    spent = torch.tensor([float(x) for x in delta_loc], dtype=torch.float64, device=device)
    return cell_batch(stacked, form, sinks is not None, visible, truth, spent)


def centred(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    residuals: tuple[Tensor, Tensor] | None,
    sm_scale: float,
    logits_soft_cap: float,
) -> tuple[Tensor, Tensor, Stored | None]:
    """Logits ``[C, S]`` and values the radii are around, float64, and what is stored if that is something else.

    The soft cap is 1-Lipschitz, so a radius around the corrected key's logit stays one behind it.
    """
    wide = k.to(torch.float64)
    logits = attention_logits(q, wide, sm_scale, logits_soft_cap)
    if residuals is None:
        return logits, v, None
    corrected = attention_logits(q, wide - residuals[0], sm_scale, logits_soft_cap)
    return corrected, v - residuals[1], Stored(logits, v)


def cell_batch(
    terms: Terms, form: str, has_sink: bool, num_visible: Tensor, tv_audit: Tensor | None, delta_loc: Tensor
) -> CellBatch:
    """Bounds of the cells whose terms ``[R, H, ...]`` are given; the other fields as in :class:`CellBatch`."""
    bounds = bounds_of(terms, form, has_sink)
    return CellBatch(
        acc=terms.acc,
        meter=bounds.meter,
        form=bounds.form,
        log_a=terms.acc[..., AccField.LOG_A].clone(),
        out_bound=bounds.out,
        out_norm=terms.norm,
        num_visible=num_visible,
        tv_audit=tv_audit,
        delta_loc=delta_loc,
        floor=bounds.floor,
    )


def true_tv(
    q: Tensor, stored: Tensor, exact: Tensor, sm_scale: float, soft_cap: float, sinks: Tensor | None
) -> Tensor:
    """True TV ``[H]``: exact weights in float64 against compressed ones in float32, as in an engine.

    Weights in float32 may sum to a little more than 1, and disjoint ones then be further apart than distributions are.
    """
    truth = attention_logits(q.to(torch.float64), exact.to(torch.float64), sm_scale, soft_cap)
    single = attention_logits(q.to(torch.float32), stored.to(torch.float32), sm_scale, soft_cap)
    return total_variation(softmax_with_sink(truth, sinks), softmax_with_sink(single, sinks)).clamp(max=1.0)


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    delta_loc: Sequence[float],
    form: str,
    exact_k: Tensor | None,
    audit_rows: Tensor | None,
) -> None:
    if q.dim() != 3 or k_cache.dim() != 3 or v_cache.dim() != 3:
        raise InputError(
            f"q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}; "
            "they must be [R, H, D], [SLOTS, Hkv, D] and [SLOTS, Hkv, Dv]"
        )
    same_slots = v_cache.shape[:2] == k_cache.shape[:2]
    if q.shape[1] % k_cache.shape[1] or q.shape[2] != k_cache.shape[2] or not same_slots:
        raise InputError(
            f"q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)} do not fit: "
            "H must be a multiple of Hkv, D equal, slots and KV heads of K and V equal"
        )
    if kv_indptr.numel() != q.shape[0] + 1 or len(delta_loc) != q.shape[0]:
        raise InputError(
            f"{q.shape[0]} rows need kv_indptr of {q.shape[0] + 1} and delta_loc of {q.shape[0]} entries, "
            f"not {kv_indptr.numel()} and {len(delta_loc)}"
        )
    if (
        bool((kv_indptr.diff() < 0).any())
        or not 0 <= int(kv_indptr[0]) <= int(kv_indptr[-1]) <= kv_indices.numel()
    ):
        raise InputError(
            f"kv_indptr runs from {int(kv_indptr[0])} to {int(kv_indptr[-1])} over {kv_indices.numel()} indices; "
            "it must rise from at least 0 to at most their number"
        )
    used = kv_indices[int(kv_indptr[0]) : int(kv_indptr[-1])]
    if bool(((used < 0) | (used >= k_cache.shape[0])).any()):
        raise InputError(
            f"kv_indices run from {int(used.min())} to {int(used.max())}; "
            f"the cache has slots 0..{k_cache.shape[0] - 1}"
        )
    if form != "auto" and form not in FORM_NAMES:
        raise InputError(f"form is {form!r}; allowed are auto, {', '.join(FORM_NAMES)}")
    if audit_rows is not None and bool(audit_rows.any()) and exact_k is None:
        raise InputError("audit_rows marks rows but exact_k is missing; pass the exact keys or no audit")
