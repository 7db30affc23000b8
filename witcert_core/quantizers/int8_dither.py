"""INT8 with subtractive dither: the controlled cache whose error law is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from witcert_core.errors import QuantizerError
from witcert_core.quantizers.base import DitheredQuantizer, Encoded, Kind, QuantContext, check_input
from witcert_core.quantizers.dither import dequantize_int8, dither_vectors, quantize_int8
from witcert_core.quantizers.layout import KVLayout


@dataclass(frozen=True)
class Int8Dither(DitheredQuantizer):
    """x~ = s (round(x/s + u) - u) per group of 32 channels, s >= max|x|/127 in fp16 rounded up.

    For keys u is drawn for the token's pass, the layer, the global head and the channel. Values are rounded to nearest,
    u = 0: their bound is the half step either way, and reading them draws nothing. 272 bytes of K and V at head_dim
    128.
    """

    name: ClassVar[str] = "int8_dither"

    def encode(self, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext) -> Encoded:
        check_input(self.name, x, kind, positions, ctx)
        if ctx.pass_ids is None or ctx.dither_key is None:
            raise QuantizerError(
                f"quantizer {self.name!r}: the context has no pass_ids or no dither_key; "
                "the engine adapter must give both for a dithered quantizer"
            )
        u = torch.zeros(1, device=x.device)
        if kind == "k":
            u = dither_vectors(ctx.dither_key, ctx.pass_ids, layer, ctx.head_ids, ctx.head_dim)
        codes, scales = quantize_int8(x, u)
        return Encoded(codes, scales, dequantize_int8(codes, scales, u))

    def bytes_per_token_head(self, head_dim: int) -> float:
        layout = KVLayout(head_dim, stored_witness=self.stored_witness, bypass_pairs=self.bypass_pairs)
        return float(layout.bytes_per_token_head)


@dataclass(frozen=True)
class Int8DitherWitness(Int8Dither):
    """int8_dither with one residual norm per group of keys beside the codes, for a deterministic bound.

    276 bytes of K and V at head_dim 128.
    """

    name: ClassVar[str] = "int8_dither_w"
    stored_witness: ClassVar[bool] = True


@dataclass(frozen=True)
class Int8DitherBypass(Int8Dither):
    """int8_dither whose outlier channels stay in 16 bit and out of the scales; packed storage only.

    pairs: channel pairs of K of each layer and head, those that are largest in the first keys written. 288 bytes of K
    and V at head_dim 128 with 4 pairs.
    """

    name: ClassVar[str] = "int8_dither_bypass"
    pairs: int = 4

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise QuantizerError(f"quantizer {self.name!r}: pairs is {self.pairs}; expected >= 1")

    @property
    def bypass_pairs(self) -> int:
        return self.pairs
