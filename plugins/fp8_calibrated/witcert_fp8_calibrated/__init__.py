"""FP8 E4M3 with one scale for every head and layer, calibrated on the first tokens of the request.

The format: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433, section 3 (E4M3, largest value 448)
and section 2 (a scale that brings the largest magnitude seen to the largest value). Engines calibrate one scale per
tensor on a data set beforehand; here it is the request's own prefix, so that no file has to be kept, and a head that
grows beyond `margin` times its prefix saturates. Heads differ by orders of magnitude in range, hence one scale each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from witcert_core import CalibratedQuantizer, CodedQuantizer, Part, QuantContext, QuantizerError, register

E4M3_MAX = 448.0


@register
@dataclass(frozen=True)
class Fp8Calibrated(CodedQuantizer, CalibratedQuantizer):
    """One byte a channel: 256 bytes of K and V at head_dim 128 (of 512 in 16 bit); a scale per request, head and layer.

    calibration_tokens: how many first tokens the scale is taken from. margin: how far later tokens may exceed them.
    """

    name: ClassVar[str] = "fp8_calibrated"
    calibration_tokens: int = 64
    margin: float = 1.5

    def __post_init__(self) -> None:
        if self.calibration_tokens < 1:
            raise QuantizerError(
                f"quantizer 'fp8_calibrated': calibration_tokens is {self.calibration_tokens}; expected >= 1"
            )
        if not 1 <= self.margin < 1e4:
            raise QuantizerError(f"quantizer 'fp8_calibrated': margin is {self.margin}; allowed: 1 to 10000")

    def calibrate(self, x: Tensor, *, kind: str, layer: int, positions: Tensor, ctx: QuantContext) -> Tensor:
        largest = x.abs().amax(dim=(0, 2))
        scale = largest * (self.margin / E4M3_MAX)
        return torch.where(scale == 0, 1.0, scale)[:, None]

    def encode(self, x: Tensor, *, kind: str, layer: int, positions: Tensor, ctx: QuantContext) -> Mapping[str, Part]:
        codes = (x / self._scale(ctx)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return {"codes": Part(codes, 8)}

    def decode(
        self, parts: Mapping[str, Part], *, kind: str, layer: int, positions: Tensor, ctx: QuantContext
    ) -> Tensor:
        return parts["codes"].values.float() * self._scale(ctx)

    def bytes_per_token_head(self, head_dim: int) -> float:
        return 2.0 * head_dim

    def _scale(self, ctx: QuantContext) -> Tensor:
        if ctx.state is None:
            raise QuantizerError("quantizer 'fp8_calibrated': the context has no state; call calibrate first")
        return ctx.state
