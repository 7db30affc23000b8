"""KIVI: asymmetric 2-bit quantization, keys per channel, values per token.

Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML 2024, arXiv:2402.02750.

What is taken from where: round-to-nearest with zero-point min and scale (max - min)/(2^B - 1), from the section on the
preliminary study of KV cache quantization; keys per channel and values per token, from the section on why key and value
cache should be quantized along different dimensions; groups of G = 32 tokens (keys) or channels (values) and a residual
of R = 128 recent tokens in 16 bit, algorithm 1.

One difference: algorithm 1 keeps the last R values but empties the residual of the keys all at once when it holds R.
Here keys and values of a token are quantized together, one group of 32 tokens at a time, so that always R - 32 to R - 1
recent tokens are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from witcert_core import CodedQuantizer, Part, QuantContext, QuantizerError, register

GROUP = 32
_FP16_MAX = torch.finfo(torch.float16).max


@register
@dataclass(frozen=True)
class Kivi(CodedQuantizer):
    """96 bytes of K and V at 2 bit and head_dim 128, 160 at 4 bit (of 512 in 16 bit), without the recent tokens.

    bits: 2 or 4. residual: R, a multiple of 32. group_size: channels of a value that share scale and zero-point.
    """

    name: ClassVar[str] = "kivi"
    token_group: ClassVar[int] = GROUP
    bits: int = 2
    residual: int = 128
    group_size: int = GROUP

    def __post_init__(self) -> None:
        if self.bits not in (2, 4):
            raise QuantizerError(f"quantizer 'kivi': bits is {self.bits}; allowed: 2, 4")
        if self.residual < GROUP or self.residual % GROUP:
            raise QuantizerError(f"quantizer 'kivi': residual is {self.residual}; allowed: multiples of {GROUP}")
        if self.group_size < 1:
            raise QuantizerError(f"quantizer 'kivi': group_size is {self.group_size}; expected >= 1")

    @property
    def recent_tokens(self) -> int:
        return self.residual - GROUP

    def encode(self, x: Tensor, *, kind: str, layer: int, positions: Tensor, ctx: QuantContext) -> Mapping[str, Part]:
        num_tokens, num_heads, dim = x.shape
        if kind == "k":
            grouped = x.reshape(num_tokens // GROUP, GROUP, num_heads, dim)
            codes, scale, zero = affine_codes(grouped, dim=1, bits=self.bits)
            scale, zero = scale.squeeze(1), zero.squeeze(1)
        else:
            codes, scale, zero = affine_codes(self._in_groups(x), dim=-1, bits=self.bits)
            scale, zero = scale.squeeze(-1), zero.squeeze(-1)
            codes = codes.flatten(2)[..., :dim]
        codes = codes.reshape(num_tokens, num_heads, dim)
        return {"codes": Part(codes, self.bits), "scale": Part(scale, 16), "zero": Part(zero, 16)}

    def decode(
        self, parts: Mapping[str, Part], *, kind: str, layer: int, positions: Tensor, ctx: QuantContext
    ) -> Tensor:
        codes = parts["codes"].values.float()
        scale, zero = parts["scale"].values.float(), parts["zero"].values.float()
        if kind == "k":
            scale, zero = (t.repeat_interleave(GROUP, 0) for t in (scale, zero))
        else:
            dim = codes.shape[-1]
            scale, zero = (t.repeat_interleave(self.group_size, -1)[..., :dim] for t in (scale, zero))
        return zero + scale * codes

    def bytes_per_token_head(self, head_dim: int) -> float:
        codes = 2 * -(-head_dim * self.bits // 8)
        return codes + 4 * head_dim / GROUP + 4 * -(-head_dim // self.group_size)

    def _in_groups(self, x: Tensor) -> Tensor:
        """x [N, H, D] as [N, H, groups, group_size]; the last channel repeated fills a short group harmlessly."""
        short = -x.shape[-1] % self.group_size
        full = torch.cat([x, x[..., -1:].expand(-1, -1, short)], -1) if short else x
        return torch.unflatten(full, -1, (-1, self.group_size))


def affine_codes(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 like x, and the scale and zero-point (float16, `dim` kept) that x's slices along `dim` share."""
    low = x.amin(dim, keepdim=True).clamp(-_FP16_MAX, _FP16_MAX)
    high = x.amax(dim, keepdim=True).clamp(-_FP16_MAX, _FP16_MAX)
    zero = low.half()
    scale = ((high - low) / (2**bits - 1)).half()
    step = torch.where(scale == 0, 1.0, scale.float())
    codes = ((x - zero.float()) / step).round().clamp(0, 2**bits - 1)
    return codes.nan_to_num(0).to(torch.uint8), scale, zero
