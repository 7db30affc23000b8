"""Measure cells: bound what compression can have done to each query row and head of one layer.

Reference path, float64, one row at a time. The kernels produce the same accumulators on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from witcert_core.errors import InputError, did_you_mean, listed
from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.audit import Audit, FormatError, Read, compare_rows
from witcert_core.meter.batching import RowBatch, batch_rows
from witcert_core.meter.bounds import FORM_NAMES
from witcert_core.meter.cells import CellBatch, Stored, Terms, bounds_of, in_rows, sum_terms
from witcert_core.meter.kernel_error import KernelArithmetic
from witcert_core.meter.protocols import JointRadii, Radii
from witcert_core.meter.sums import AccField

MAX_CELLS = 4096
"""Cells whose bounds are taken at a time: a few megabytes for each of their grids."""


@dataclass(frozen=True)
class Summed:
    """The sums of ``R`` rows and ``H`` heads of one layer, ``terms [R, H, ...]``; the others as in `CellBatch`."""

    terms: Terms
    form: str
    has_sink: bool
    num_visible: Tensor
    num_quantized: Tensor
    audit: Audit | None
    delta_loc: Tensor


def measure(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    spec: AttentionSpec,
    radii: Radii,
    delta_loc: Sequence[float],
    form: str = "auto",
    exact_k: Tensor | None = None,
    audit_rows: Tensor | None = None,
    outputs: Sequence[Tensor | None] | None = None,
) -> CellBatch:
    """Meter ``R`` query rows of one layer; the rows and tokens as FlashInfer is given them.

    Args:
        q: ``[R, H, D]`` queries as attention uses them.
        k_cache: ``[SLOTS, Hkv, D]`` keys as the kernel reads them.
        v_cache: ``[SLOTS, Hkv, Dv]`` values as the kernel reads them.
        kv_indptr: int ``[R + 1]``, row ``r`` sees ``kv_indices[kv_indptr[r]:kv_indptr[r + 1]]``.
        kv_indices: int slots of the visible tokens in order of position, causality already applied.

    The others as in :func:`measure_rows`.

    Raises:
        InputError: shapes that do not fit, a row that sees nothing, an unknown form, an audit without keys.

    Example:
        >>> import torch, witcert_core as wc
        >>> k, v, q = torch.randn(3, 20, 2, 16).unbind(0)
        >>> stored = (k * 8).round() / 8  # what a cache made of the keys; values are exact here
        >>> class Errors:
        ...     def key_radius(self, q, slots, sm_scale, delta_loc):
        ...         error = (stored - k)[slots].double().norm(dim=-1).mT.repeat_interleave(len(q) // 2, 0)
        ...         return sm_scale * q.norm(dim=-1, keepdim=True) * error
        ...     def value_radius(self, slots):
        ...         return torch.zeros(len(slots), 2, dtype=torch.float64)
        ...     def residuals(self, slots):
        ...         return None
        ...     def exact_heads(self, slots):
        ...         return torch.zeros(len(slots), 2, dtype=torch.bool)
        >>> cells = wc.measure(
        ...     q[:1], stored, v, kv_indptr=torch.tensor([0, 20]), kv_indices=torch.arange(20),
        ...     spec=wc.AttentionSpec(0.25), radii=Errors(), delta_loc=[0.0],
        ...     exact_k=k, audit_rows=torch.tensor([True]),
        ... )
        >>> bool((cells.tv_audit <= cells.meter).all())
        True
    """
    _check(q, k_cache, v_cache, kv_indptr, kv_indices, delta_loc)
    bounds = kv_indptr.tolist()
    summed = measure_rows(
        q,
        lambda slots: (k_cache.index_select(0, slots), v_cache.index_select(0, slots)),
        [kv_indices[first:last].to(torch.int64) for first, last in itertools.pairwise(bounds)],
        spec=spec,
        radii=radii,
        delta_loc=delta_loc,
        form=form,
        exact_k=exact_k,
        audit_rows=audit_rows,
        outputs=outputs,
    )
    return bound_cells([summed])[0]


def measure_rows(
    q: Tensor,
    read: Read,
    seen: Sequence[Tensor],
    *,
    spec: AttentionSpec,
    radii: Radii,
    delta_loc: Sequence[float],
    form: str = "auto",
    exact_k: Tensor | None = None,
    audit_rows: Tensor | None = None,
    outputs: Sequence[Tensor | None] | None = None,
    format_error: FormatError | None = None,
) -> Summed:
    """Sum up ``R`` query rows of one layer; :func:`bound_cells` makes cells of the sums.

    The weights are recomputed in float64 from the stored keys. Those of the engine's own kernel lie within
    ``tanh(max omega / 2)`` of them, ``omega`` being its arithmetic, and that is added, as is what it does to outputs.

    Args:
        q: ``[R, H, D]`` queries as attention uses them.
        read: what the kernel reads in some slots.
        seen: per row, the int64 slots of its visible tokens in order of position.
        spec: how the layer attends; its window is applied to what rows see.
        radii: bounds for this layer's slots.
        delta_loc: per row, probability each of its cells may spend (0: the deterministic tier).
        form: ``auto`` (the meter), or one name of ``FORM_NAMES``.
        exact_k: ``[SLOTS, Hkv, D]`` exact keys, for audits.
        audit_rows: bool ``[R]``, rows whose true TV is computed.
        outputs: per row what the engine made of it, ``[H, Dv]``, for audits; None where what it read is not known.
        format_error: what the kernel's product with codes errs by beyond its arithmetic on numbers; none by default.

    Raises:
        InputError: a row that sees nothing, an unknown form, an audit without keys.
    """
    _check_options(form, exact_k, audit_rows)
    seen = [spec.visible(slots) for slots in seen]
    for r, slots in enumerate(seen):
        if slots.numel() == 0:
            raise InputError(f"row {r} sees no token; leave padded rows out of the batch")
    num_rows, heads, scale = q.shape[0], q.shape[1], abs(spec.sm_scale)
    quantized = torch.zeros(num_rows, heads, dtype=torch.int64, device=q.device)
    parts: list[Terms] = []
    order: list[int] = []
    for batch in batch_rows(seen, q[0].numel() if num_rows else 1):
        rows = q[batch.rows]
        flat = batch.slots.flatten()
        k, v = (batch.heads(x) for x in read(flat))
        unseen = batch.unseen(heads)
        c = key_radii(radii, rows.double(), batch, unseen, scale, [float(delta_loc[r]) for r in batch.rows])
        further = None
        if format_error is not None:
            places = [batch.slots[:count, i] for i, count in enumerate(batch.lengths)]
            further = batch.stacked([format_error(*x) for x in zip(rows.double(), places, strict=True)])
        sinks = None if spec.sinks is None else spec.sinks.repeat(len(batch.rows))
        own = replace(spec, sinks=sinks)
        tokens = Tokens.of(batch, k, v, radii)
        parts.append(attended(rows.flatten(0, 1), tokens, own, unseen, further).terms(c, form))
        order += batch.rows
        quantized[batch.rows] = batch.counts(~radii.exact_heads(flat), heads)

    found = None
    if audit_rows is not None and exact_k is not None:
        found = compare_rows(q, outputs or [None] * num_rows, seen, read, exact_k.__getitem__, audit_rows, spec)
    return Summed(
        terms=in_rows(parts, order, heads, q.device),
        form=form,
        has_sink=spec.has_sink,
        num_visible=torch.tensor([slots.numel() for slots in seen], dtype=torch.int64, device=q.device),
        num_quantized=quantized,
        audit=found,
        delta_loc=torch.tensor([float(x) for x in delta_loc], dtype=torch.float64, device=q.device),
    )


def key_radii(
    radii: Radii, q: Tensor, batch: RowBatch, unseen: Tensor | None, sm_scale: float, delta_loc: list[float]
) -> Tensor:
    """Float64 ``[R * H, S]`` for ``q [R, H, D]`` of the rows side by side, 0 where ``unseen`` says so."""
    if len(batch.rows) > 1 and not any(delta_loc) and isinstance(radii, JointRadii):
        joint = radii.joint_key_radius(q.flatten(0, 1), batch.slots, sm_scale)
        return joint if unseen is None else joint.masked_fill(unseen, 0.0)
    # Row by row: under the dither law a radius depends on how many tokens its own row sees.
    slots = [batch.slots[:count, i] for i, count in enumerate(batch.lengths)]
    each = zip(q, slots, delta_loc, strict=True)
    return batch.stacked([radii.key_radius(row, own, sm_scale, d).to(torch.float64) for row, own, d in each])


def cell_batch(
    terms: Terms,
    form: str,
    has_sink: bool,
    num_visible: Tensor,
    num_quantized: Tensor,
    audit: Audit | None,
    delta_loc: Tensor,
) -> CellBatch:
    """Bounds of the cells whose terms ``[R, H, ...]`` are given; the other fields as in :class:`CellBatch`."""
    return _bounded([Summed(terms, form, has_sink, num_visible, num_quantized, audit, delta_loc)])[0]


def bound_cells(layers: Sequence[Summed]) -> list[CellBatch]:
    """The cells of some layers, those of several layers in one go: a bound is some hundred small operations."""
    found: list[CellBatch] = []
    for _, group in itertools.groupby(layers, key=lambda x: (x.form, x.has_sink, x.terms.acc.shape)):
        alike = list(group)
        size = max(1, MAX_CELLS // max(1, alike[0].terms.norm.numel()))
        for first in range(0, len(alike), size):
            found += _bounded(alike[first : first + size])
    return found


def _bounded(layers: list[Summed]) -> list[CellBatch]:
    """The cells of layers of one form and shape, on the host: bounds are many operations on few numbers."""
    terms = [x.terms.mapped(Tensor.cpu) for x in layers]
    bounds = bounds_of(Terms.joined(terms, torch.stack), layers[0].form, layers[0].has_sink)
    return [
        CellBatch(
            acc=own.acc,
            meter=bounds.meter[i],
            form=bounds.form[i],
            log_a=own.acc[..., AccField.LOG_A],
            out_bound=bounds.out[i],
            out_norm=own.norm,
            num_visible=layer.num_visible.cpu(),
            num_quantized=layer.num_quantized.cpu(),
            tv_audit=None if layer.audit is None else layer.audit.tv,
            delta_loc=layer.delta_loc.cpu(),
            floor=bounds.floor[i],
            excess=None if layer.audit is None else layer.audit.excess,
        )
        for i, (layer, own) in enumerate(zip(layers, terms, strict=True))
    ]


@dataclass(frozen=True)
class Tokens:
    """S tokens of K KV heads, those of one row or of several side by side.

    Args:
        k: ``[S, K, D]`` keys as the kernel reads them.
        v: ``[S, K, Dv]`` values as the kernel reads them.
        rho: float64 ``[S, K]`` radii of the values.
        residuals: estimates of what quantization added to k and v, float64, or None; radii are then around the
            corrected keys and values.
    """

    k: Tensor
    v: Tensor
    rho: Tensor
    residuals: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, batch: RowBatch, k: Tensor, v: Tensor, radii: Radii) -> Tokens:
        """Those of a batch, of which ``k [S, K, D]`` and ``v [S, K, Dv]`` were read already."""
        flat = batch.slots.flatten()
        residuals = radii.residuals(flat)
        if residuals is not None:
            residuals = batch.heads(residuals[0]), batch.heads(residuals[1])
        return cls(k, v, batch.heads(radii.value_radius(flat)), residuals)


@dataclass(frozen=True)
class AttendedCells:
    """C cells over S tokens: what there is to know of them but how far each key may be from exact.

    Args:
        logits: float64 ``[C, S]`` of the (corrected) keys, -inf for tokens a cell does not see.
        values: float64 ``[S, K, Dv]``, (corrected) values.
        rho: float64 ``[S, K]`` their radii.
        omega: float64 ``[C, S]`` of `kernel_error.kernel_radius`, 0 for tokens a cell does not see.
        num_tokens: float64 ``[C]``, how many tokens a cell sees.
        sinks: ``[C]`` or None.
        arithmetic: of the kernel that attended.
        stored: what the cache holds, where that is not what the logits and values are of.
    """

    logits: Tensor
    values: Tensor
    rho: Tensor
    omega: Tensor
    num_tokens: Tensor
    sinks: Tensor | None
    arithmetic: KernelArithmetic
    stored: Stored | None

    def terms(self, c: Tensor, form: str = "auto") -> Terms:
        """Their sums for radii ``c [C, S]`` of the keys, 0 for tokens a cell does not see."""
        return sum_terms(
            self.logits,
            c,
            self.omega,
            self.values,
            self.rho,
            arithmetic=self.arithmetic,
            num_tokens=self.num_tokens,
            sinks=self.sinks,
            form=form,
            stored=self.stored,
        )


def attended(
    q: Tensor, tokens: Tokens, spec: AttentionSpec, unseen: Tensor | None = None, further: Tensor | None = None
) -> AttendedCells:
    """Cells of ``q [C, D]``, in the kernel's dtype; cell ``i`` reads KV head ``i // (C / K)`` of the tokens.

    The soft cap is 1-Lipschitz, so a radius around the corrected key's logit stays one behind it.

    Args:
        spec: its sinks ``[C]``, one a cell.
        unseen: bool ``[C, S]``, tokens a cell does not see; None where it sees all.
        further: ``[C, S]``, more error of each logit than the kernel's arithmetic on numbers makes.
    """
    query, keys, values = q.to(torch.float64), tokens.k.to(torch.float64), tokens.v.to(torch.float64)
    arithmetic = spec.kernel(q.dtype, tokens.k.dtype, tokens.v.dtype)
    omega = spec.kernel_radius(query, tokens.k, arithmetic)
    if further is not None:
        omega = omega + further
    logits, stored_logits = spec.logits(query, keys), None
    if tokens.residuals is not None:
        stored_logits, logits = logits, spec.logits(query, keys - tokens.residuals[0])
    seen = torch.full((len(q),), float(len(keys)), dtype=torch.float64, device=q.device)
    if unseen is not None:
        seen = (~unseen).sum(-1).to(torch.float64)
        logits, omega = logits.masked_fill(unseen, float("-inf")), omega.masked_fill(unseen, 0.0)
        stored_logits = None if stored_logits is None else stored_logits.masked_fill(unseen, float("-inf"))
    stored = None
    if stored_logits is not None and tokens.residuals is not None:
        stored, values = Stored(stored_logits, values), values - tokens.residuals[1]
    return AttendedCells(logits, values, tokens.rho, omega, seen, spec.sinks, arithmetic, stored)


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    delta_loc: Sequence[float],
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
    if bool((kv_indptr.diff() < 0).any()) or not 0 <= int(kv_indptr[0]) <= int(kv_indptr[-1]) <= kv_indices.numel():
        raise InputError(
            f"kv_indptr runs from {int(kv_indptr[0])} to {int(kv_indptr[-1])} over {kv_indices.numel()} indices; "
            "it must rise from at least 0 to at most their number"
        )
    used = kv_indices[int(kv_indptr[0]) : int(kv_indptr[-1])]
    if bool(((used < 0) | (used >= k_cache.shape[0])).any()):
        raise InputError(
            f"kv_indices run from {int(used.min())} to {int(used.max())}; the cache has slots 0..{k_cache.shape[0] - 1}"
        )


def _check_options(form: str, exact_k: Tensor | None, audit_rows: Tensor | None) -> None:
    if form != "auto" and form not in FORM_NAMES:
        raise InputError(f"form is {form!r}{did_you_mean(form, FORM_NAMES)}; allowed are auto, {listed(FORM_NAMES)}")
    if audit_rows is not None and bool(audit_rows.any()) and exact_k is None:
        raise InputError("audit_rows marks rows but exact_k is missing; pass the exact keys or no audit")
