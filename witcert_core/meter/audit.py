"""What an audit compares: a row's true TV with its bound, and the engine's output with attention over what is stored.

The first cannot see a wrong window, scale, cap or sink, since both of its sides use ours. The second can: whatever the
engine attends to, its output must be that of the weights the meter speaks of, up to the rounding of its kernel. Where
it is not, the cell's bound is about other weights than those that were served: a *mismatch*.

Shapes: R rows, H query heads, S tokens a row sees, Hkv KV heads, D and Dv channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.kernel_error import attention_error
from witcert_core.meter.sums import weighted_values
from witcert_core.meter.tv import softmax_with_sink, total_variation

Read = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Slots int64 ``[S]`` -> keys ``[S, Hkv, D]`` and values ``[S, Hkv, Dv]``."""
FormatError = Callable[[Tensor, Tensor], Tensor]
"""``q [H, D]`` float64 and slots ``[S]`` -> ``[H, S]``: what a kernel that reads codes adds to the error of a logit."""


@dataclass(frozen=True)
class Audit:
    """Of ``R`` rows, float64 ``[R, H]``, NaN where nothing was compared.

    tv: true TV. excess: how much further the engine's output is from attention over what is stored than its arithmetic
    may take it; above 0 it is a mismatch.
    """

    tv: Tensor
    excess: Tensor


def compare_rows(
    q: Tensor,
    outputs: Sequence[Tensor | None],
    seen: Sequence[Tensor],
    read: Read,
    exact: Callable[[Tensor], Tensor] | None,
    audited: Tensor,
    spec: AttentionSpec,
    format_error: FormatError | None = None,
) -> Audit | None:
    """Audit the rows that ``audited [R]`` marks; None if there are none.

    Args:
        q: ``[R, H, D]`` queries as attention uses them.
        outputs: per row what the engine made of it, ``[H, Dv]``; None where what the engine read is not known.
        seen: per row, where the tokens it sees are, in order of position, the window of `spec` applied already.
        read: what the engine read there.
        exact: the exact keys ``[S, Hkv, D]`` there; None where none were kept, and then outputs alone are compared.
    """
    if not bool(audited.any()):
        return None
    tv, excess = (torch.full(q.shape[:2], float("nan"), dtype=torch.float64) for _ in range(2))
    for r in audited.nonzero().flatten().tolist():
        k, v = read(seen[r])
        if exact is not None:
            tv[r] = true_tv(q[r], k, exact(seen[r]), spec).cpu()
        output = outputs[r]
        if output is not None:
            extra = 0.0 if format_error is None else format_error(q[r].to(torch.float64), seen[r])
            excess[r] = output_excess(q[r], output, k, v, spec, extra).cpu()
    return Audit(tv, excess)


def output_excess(
    q: Tensor, output: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extra: Tensor | float = 0.0
) -> Tensor:
    """``[H]``: how far ``output [H, Dv]`` is from attention over k and v, beyond what its kernel's arithmetic may do.

    extra: more error of each logit, ``[H, S]``. NaN where attention over k and v is no number itself.
    """
    rows, values, arithmetic = q.to(torch.float64), v.to(torch.float64), spec.kernel(q.dtype, k.dtype, v.dtype)
    weights = softmax_with_sink(spec.logits(rows, k.to(torch.float64)), spec.sinks)
    truth = weighted_values(weights[:, : len(k)], values)
    omega = spec.kernel_radius(rows, k, arithmetic) + extra
    allowed = attention_error(weights, values, omega, num_tokens=len(k), arithmetic=arithmetic)
    apart: Tensor = (output.to(torch.float64) - truth).norm(dim=-1)
    excess = (apart - allowed).nan_to_num(nan=float("inf"))
    return excess.masked_fill(~truth.isfinite().all(-1) | allowed.isinf(), float("nan"))


def true_tv(q: Tensor, stored: Tensor, exact: Tensor, spec: AttentionSpec) -> Tensor:
    """True TV ``[H]``: exact weights in float64 against compressed ones in float32, as in an engine.

    Args:
        q: ``[H, D]``.
        stored: ``[S, Hkv, D]`` keys as the kernel reads them.
        exact: ``[S, Hkv, D]`` keys that the run handed over.
    """
    return total_variation(*_weights(q, stored, exact, spec)).clamp(max=1.0)


def true_error(
    q: Tensor, stored: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Of one row ``q [H, D]``: true TV ``[H]``, as `true_tv`, and output error ``||o - o~|| [H]``, float64.

    Compressed weights are in float32, as an engine takes them, their sum over stored values in float64.

    Args:
        stored: keys ``[S, Hkv, D]`` and values ``[S, Hkv, Dv]`` as the kernel reads them.
        exact: those that the run handed over.
    """
    both = _weights(q, stored[0], exact[0], spec)
    out, served = (
        weighted_values(weights[:, : len(v)].to(torch.float64), v.to(torch.float64))
        for weights, v in zip(both, (exact[1], stored[1]), strict=True)
    )
    return total_variation(*both).clamp(max=1.0), (out - served).norm(dim=-1)


def _weights(q: Tensor, stored: Tensor, exact: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Exact weights ``[H, S]`` in float64 and compressed ones in float32, divided by their own sum, a sink's last.

    In float32 a weight of 1 - 1e-8 is 1: without the division half of what the others weigh would be called variation,
    which an engine that divides its output by the sum of its weights does not have.
    """
    truth = spec.logits(q.to(torch.float64), exact.to(torch.float64))
    single = softmax_with_sink(spec.logits(q.to(torch.float32), stored.to(torch.float32)), spec.sinks).to(torch.float64)
    return softmax_with_sink(truth, spec.sinks), single / single.sum(dim=-1, keepdim=True)
