"""How a layer attends, besides causality: what the meter, the audits and every cache of ours are told about it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.meter.kernel_error import KernelArithmetic, kernel_radius
from witcert_core.meter.tv import attention_logits


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention, in FlashInfer's words.

    Args:
        sm_scale: what logits are multiplied with before the softmax.
        logits_soft_cap: ``cap * tanh(z / cap)`` of each logit z; 0 for none.
        window_left: a row sees its own token and this many before it; negative for no window.
        sinks: ``[H]`` learned sink logits, or None.
        arithmetic: of the kernel that attends; None for the least exact one that the dtypes allow.

    Raises:
        InputError: a scale that is 0 or not finite, a cap that is negative or not finite.

    Example:
        >>> import torch, witcert_core as wc
        >>> wc.AttentionSpec(sm_scale=0.125, window_left=2).visible(torch.arange(10))
        tensor([7, 8, 9])
    """

    sm_scale: float
    logits_soft_cap: float = 0.0
    window_left: int = -1
    sinks: Tensor | None = None
    arithmetic: KernelArithmetic | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sm_scale) and self.sm_scale):
            raise InputError(f"sm_scale is {self.sm_scale!r}; expected a finite number that is not 0")
        if not 0 <= self.logits_soft_cap < math.inf:
            raise InputError(f"logits_soft_cap is {self.logits_soft_cap!r}; expected 0 for none, or a positive number")

    @property
    def has_sink(self) -> bool:
        return self.sinks is not None

    def visible(self, tokens: Tensor) -> Tensor:
        """Of a row's tokens ``[S]`` in order of position, its own last, those in its window."""
        return tokens if self.window_left < 0 else tokens[-(self.window_left + 1) :]

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """``[H, S]`` of ``q [H, D]`` against ``k [S, Hkv, D]``, in the dtype of the arguments."""
        return attention_logits(q, k, self.sm_scale, self.logits_soft_cap)

    def kernel(self, q: torch.dtype, *stored: torch.dtype) -> KernelArithmetic:
        """The arithmetic of the kernel that attends with queries of dtype ``q`` over a pool of these dtypes."""
        return self.arithmetic or KernelArithmetic.of(q, *stored)

    def kernel_radius(self, q: Tensor, k: Tensor, arithmetic: KernelArithmetic) -> Tensor:
        """``omega [H, S]`` float64 of `kernel_error.kernel_radius`, for ``q [H, D]`` and ``k [S, Hkv, D]``."""
        return kernel_radius(q, k, abs(self.sm_scale), self.logits_soft_cap, arithmetic)
