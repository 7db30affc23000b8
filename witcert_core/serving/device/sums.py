"""The sums that kernels leave on their device, and how they become `Summed` when the pass is over.

Nothing waits for the device in a layer: what a layer found stays where it is until all layers of the pass are bounded.

Shapes: R rows, H query heads, Dv channels of an output.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from witcert_core.meter.audit import Audit
from witcert_core.meter.cells import Terms, value_sizes
from witcert_core.meter.kernel_error import KernelArithmetic, lost_weight, odds_moved, output_error
from witcert_core.meter.measure import Summed
from witcert_core.meter.sums import AccField

NORM_SLACK = 2.0**-16
"""Relative error of a norm of up to 2^11 channels taken in float32."""


def output_norm(out: Tensor) -> Tensor:
    """Float32 [...] norms of the outputs [..., Dv] that a kernel handed on, off by at most `NORM_SLACK`."""
    return out.float().square().sum(-1).sqrt()


@dataclass(frozen=True)
class DeviceSums:
    """The accumulators of one layer's rows, float32 on the device.

    acc [R, H, 16]; norm [R, H], of `output_norm` of what was handed on; arithmetic is that of the kernel that attended.
    omega [R, H]: how far the logits of that kernel, the engine's own, may be from those of these sums, of `certify`;
    None where one kernel attended and summed. num_quantized int64 [R, Hkv], a head for G query heads.
    """

    acc: Tensor
    norm: Tensor
    omega: Tensor | None
    num_visible: Sequence[int]
    num_quantized: Tensor
    delta_loc: Sequence[float]
    form: str
    has_sink: bool
    v_dim: int
    arithmetic: KernelArithmetic
    audit: Audit | None = None

    def on_host(self) -> DeviceSums:
        """The same, waiting for the device."""
        acc, norm, quantized = self.acc.cpu(), self.norm.cpu(), self.num_quantized.cpu()
        omega = None if self.omega is None else self.omega.cpu()
        return replace(self, acc=acc, norm=norm, omega=omega, num_quantized=quantized)


Sums = Summed | DeviceSums


def settled(layers: Sequence[Sums]) -> list[Summed]:
    """The sums of some layers in float64 terms, on the host; alike ones at once, which are many operations on few
    numbers.

    The accumulators stay float32: their rounding is that of fp32 sums (`sums.SUM_SLACK`). They are of the weights that
    the kernel computed, and each radius holds how it computed them; the engine's weights, where another kernel made
    them, lie within ``tanh(omega / 2)`` of these. Bounds need the norm of the accumulators' output from below; only
    what was handed on is known, which is at most `output_error` from it. That itself needs the norm from above, which
    no mean of values passes.
    """
    found: list[Summed] = []
    for _, group in itertools.groupby(layers, key=_kind):
        found += _settled_alike(list(group))
    return found


def _kind(sums: Sums) -> object:
    """Equal for sums that are settled at once; those that are settled already are left apart."""
    if isinstance(sums, Summed):
        return id(sums)
    return sums.acc.shape, sums.omega is None, sums.form, sums.has_sink, sums.v_dim, sums.arithmetic


def _settled_alike(layers: list[Sums]) -> list[Summed]:
    mine = [sums.on_host() for sums in layers if isinstance(sums, DeviceSums)]
    if not mine:
        return [sums for sums in layers if isinstance(sums, Summed)]
    arithmetic, has_sink, v_dim = mine[0].arithmetic, mine[0].has_sink, mine[0].v_dim
    visible = torch.tensor([list(one.num_visible) for one in mine], dtype=torch.int64)
    seen = visible.double()[..., None]
    acc = torch.stack([one.acc for one in mine])
    handed_on = torch.stack([one.norm for one in mine]).double()
    omegas = [one.omega for one in mine if one.omega is not None]
    if omegas:
        extra = odds_moved(torch.stack(omegas).double() * (1.0 + 2.0**-20), seen).nan_to_num(nan=1.0)
    else:
        own = math.tanh(0.5 * arithmetic.cast_radius) * (1.0 + 2.0**-36)
        extra = torch.full(handed_on.shape, own, dtype=torch.float64)
    # TV between the accumulators' weights and those that met V, but for what float16 lost.
    extra = (extra + lost_weight(seen, arithmetic)).clamp(max=1.0)
    most = value_sizes(acc, torch.zeros_like(handed_on), has_sink)["mean_norm"]
    for _ in range(2):  # the second time with what the first said of the norm
        sizes = value_sizes(acc, most, has_sink)
        error = output_error(extra, **sizes, num_tokens=seen, v_dim=v_dim, arithmetic=arithmetic)
        most = torch.minimum(most, handed_on * (1.0 + NORM_SLACK) + error)
    below = (handed_on * (1.0 - NORM_SLACK) - error).nan_to_num(nan=0.0).clamp(min=0.0)
    none = torch.zeros_like(below)
    unknown = torch.full_like(below, float("inf"))  # directions: sums do not tell them
    square = acc[..., AccField.V2].double()
    terms = [acc, extra, below, none, below, none, none, square, unknown, error]
    return [
        Summed(
            terms=Terms(*(term[i] for term in terms)),
            form=one.form,
            has_sink=has_sink,
            num_visible=visible[i],
            num_quantized=one.num_quantized.repeat_interleave(below.shape[2] // one.num_quantized.shape[1], 1),
            audit=one.audit,
            delta_loc=torch.tensor(list(one.delta_loc), dtype=torch.float64),
        )
        for i, one in enumerate(mine)
    ]
