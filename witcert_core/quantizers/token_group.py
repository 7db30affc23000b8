"""Asymmetric integers, one scale and one zero-point per token, head and group of channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from witcert_core.errors import QuantizerError
from witcert_core.quantizers.base import Kind, QuantContext, check_input
from witcert_core.quantizers.coded import CodedQuantizer
from witcert_core.quantizers.dither import FP16_MAX
from witcert_core.quantizers.packing import Part

MAX_GROUP = 65_536
"""More channels than a head has; a short group is filled up to its size."""
_FP16_LEAST = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps


@dataclass(frozen=True)
class _TokenGroup(CodedQuantizer):
    """x~ = zero + scale * round((x - zero) / scale) with fp16 zero = min, scale = (max - min)/(2^bits - 1).

    Ranges beyond fp16 saturate; a NaN makes its own group NaN. The last group may be short.
    """

    kinds_alike: ClassVar[bool] = True
    bits: ClassVar[int]
    group_size: int = 32

    def __post_init__(self) -> None:
        if not 1 <= self.group_size <= MAX_GROUP:
            raise QuantizerError(f"quantizer {self.name!r}: group_size is {self.group_size}; expected 1 to {MAX_GROUP}")

    def encode(self, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext) -> Mapping[str, Part]:
        codes, scale, zero = self._coded(x)
        codes = codes.nan_to_num_(nan=0.0).to(torch.uint8)  # of a NaN the group's zero is one, and says so
        return {
            "codes": Part(codes.flatten(start_dim=2)[..., : x.shape[-1]], self.bits),
            "scale": Part(scale.squeeze(-1), 16),
            "zero": Part(zero.squeeze(-1), 16),
        }

    def decode(
        self, parts: Mapping[str, Part], *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext
    ) -> Tensor:
        codes = parts["codes"].values
        head_dim = codes.shape[-1]
        scale, zero = (parts[name].values.to(torch.float32)[..., None] for name in ("scale", "zero"))
        full = torch.nn.functional.pad(codes, (0, -head_dim % self.group_size))
        grouped = full.unflatten(-1, (-1, self.group_size)).to(torch.float32)
        stored: Tensor = grouped.mul_(scale).add_(zero).flatten(start_dim=2)
        return stored[..., :head_dim].contiguous()

    def fake_quantize(self, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext) -> Tensor:
        """As decode would have it of what encode makes, without the codes as integers between them."""
        check_input(self.name, x, kind, positions, ctx)
        codes, scale, zero = self._coded(x)
        stored: Tensor = codes.mul_(scale.to(torch.float32)).add_(zero.to(torch.float32)).flatten(start_dim=2)
        return stored[..., : x.shape[-1]].contiguous()

    def _coded(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [N, H, G, group_size] float32, scale and zero [N, H, G, 1] float16 of x [N, H, D]."""
        num_tokens, num_heads, head_dim = x.shape
        num_groups = -(-head_dim // self.group_size)
        short = num_groups * self.group_size - head_dim
        # Repeating the last channel fills a short group without touching its minimum or maximum.
        full = torch.cat([x, x[..., -1:].expand(-1, -1, short)], dim=-1) if short else x
        grouped = full.reshape(num_tokens, num_heads, num_groups, self.group_size)
        largest_code = 2**self.bits - 1
        low = grouped.amin(dim=-1, keepdim=True).clamp_(-FP16_MAX, FP16_MAX)
        high = grouped.amax(dim=-1, keepdim=True).clamp_(-FP16_MAX, FP16_MAX)
        zero, scale = low.to(torch.float16), ((high - low) / largest_code).to(torch.float16)
        step = scale.to(torch.float32).clamp(min=_FP16_LEAST)  # where the scale is 0 every code means zero
        codes = (grouped - zero.to(torch.float32)).div_(step).round_().clamp_(0, largest_code)
        return codes, scale, zero


@dataclass(frozen=True)
class Int8TokenGroup(_TokenGroup):
    """256 levels per group: 288 bytes of K and V at head_dim 128."""

    name: ClassVar[str] = "int8_token_group"
    bits: ClassVar[int] = 8


@dataclass(frozen=True)
class Int4TokenGroup(_TokenGroup):
    """16 levels per group: 160 bytes of K and V at head_dim 128."""

    name: ClassVar[str] = "int4_token_group"
    bits: ClassVar[int] = 4


@dataclass(frozen=True)
class Int2TokenGroup(_TokenGroup):
    """4 levels per group: 96 bytes of K and V at head_dim 128."""

    name: ClassVar[str] = "int2_token_group"
    bits: ClassVar[int] = 2
