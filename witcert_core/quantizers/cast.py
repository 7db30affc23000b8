"""No quantization, and the plain casts to 8-bit floats that engines offer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from witcert_core.quantizers.base import Kind, QuantContext, Quantizer, check_input
from witcert_core.quantizers.coded import CodedQuantizer
from witcert_core.quantizers.packing import Part


@dataclass(frozen=True)
class NoQuantizer(Quantizer):
    """The exact 16-bit cache: what metering costs when there is nothing to find."""

    name: ClassVar[str] = "none"
    kinds_alike: ClassVar[bool] = True

    def fake_quantize(self, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext) -> Tensor:
        check_input(self.name, x, kind, positions, ctx)
        return x.clone()

    def bytes_per_token_head(self, head_dim: int) -> float:
        return 4.0 * head_dim


@dataclass(frozen=True)
class _Float8Cast(CodedQuantizer):
    """Scale 1, ties to even; beyond the largest finite value (Inf too) it saturates, NaN stays NaN."""

    kinds_alike: ClassVar[bool] = True
    float8: ClassVar[torch.dtype]

    def encode(self, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext) -> Mapping[str, Part]:
        largest = torch.finfo(self.float8).max
        return {"codes": Part(x.clamp(-largest, largest).to(self.float8), 8)}

    def decode(
        self, parts: Mapping[str, Part], *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext
    ) -> Tensor:
        return parts["codes"].values.to(torch.float32)


@dataclass(frozen=True)
class Float8E4M3Cast(_Float8Cast):
    """4 exponent and 3 mantissa bits, largest value 448."""

    name: ClassVar[str] = "fp8_e4m3_cast"
    float8: ClassVar[torch.dtype] = torch.float8_e4m3fn


@dataclass(frozen=True)
class Float8E5M2Cast(_Float8Cast):
    """5 exponent and 2 mantissa bits, largest value 57344."""

    name: ClassVar[str] = "fp8_e5m2_cast"
    float8: ClassVar[torch.dtype] = torch.float8_e5m2
