"""NVFP4: 4-bit floats with a scale for every 16 channels and one for the tensor.

The element is E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), Rouhani et al., "OCP Microscaling Formats (MX)
Specification v1.0", the section on the element format FP4, and "Microscaling Data Formats for Deep Learning",
arXiv:2310.10537. In place of the power-of-two scale of 32 elements there, NVFP4 has an E4M3 scale for 16 and a float32
scale for the tensor: "Pretraining Large Language Models with NVFP4", arXiv:2509.25149, the section on the format and
the appendix on the quantization procedure (x~ = element * block scale * tensor scale; block scale = amax / 6 / tensor
scale, to nearest; elements to nearest, ties to even).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from witcert_core import CodedQuantizer, Part, QuantContext, QuantizerError, register

BLOCK = 16
LARGEST = 6.0
E4M3_MAX = 448.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SIGN_BIT = 8


def _edges() -> Tensor:
    """Between the magnitudes; a value on one goes to the neighbour with an even code, the lower one first."""
    middle = (E2M1[1:] + E2M1[:-1]) / 2
    below = torch.nextafter(middle, torch.zeros_like(middle))
    return torch.where(torch.arange(len(middle)) % 2 == 1, below, middle)


_EDGES = _edges()


@register
@dataclass(frozen=True)
class NvFp4(CodedQuantizer):
    """72 bytes for a key or value of head_dim 128 (of 256 in 16 bit).

    k_scale, v_scale: the tensor scales, amax / 2688 if amax is known. 1 serves blocks of amax 0.1 to 2688.
    """

    name: ClassVar[str] = "nvfp4"
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if not (math.isfinite(scale) and scale > 0):
                raise QuantizerError(f"quantizer 'nvfp4': {name} is {scale}; expected a positive finite number")

    def encode(self, x: Tensor, *, kind: str, layer: int, positions: Tensor, ctx: QuantContext) -> Mapping[str, Part]:
        tensor_scale = self.k_scale if kind == "k" else self.v_scale
        dim = x.shape[-1]
        blocks = torch.unflatten(torch.nn.functional.pad(x, (0, -dim % BLOCK)), -1, (-1, BLOCK))
        wanted = blocks.abs().amax(-1) / LARGEST / tensor_scale
        scale = wanted.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
        step = scale.float()[..., None] * tensor_scale
        scaled = blocks / torch.where(step == 0, 1.0, step)
        # A block whose scale rounds to zero gives back zeros whatever its codes are.
        magnitude = torch.bucketize(scaled.abs().contiguous(), _EDGES.to(x.device))
        codes = (magnitude + SIGN_BIT * (scaled < 0)).flatten(2)[..., :dim]
        return {"codes": Part(codes.to(torch.uint8), 4), "scale": Part(scale, 8)}

    def decode(
        self, parts: Mapping[str, Part], *, kind: str, layer: int, positions: Tensor, ctx: QuantContext
    ) -> Tensor:
        codes, scale = parts["codes"].values.long(), parts["scale"].values.float()
        elements = E2M1.to(codes.device)[codes % SIGN_BIT] * (1.0 - 2.0 * (codes >= SIGN_BIT))
        tensor_scale = self.k_scale if kind == "k" else self.v_scale
        return elements * (scale * tensor_scale).repeat_interleave(BLOCK, -1)[..., : codes.shape[-1]]

    def bytes_per_token_head(self, head_dim: int) -> float:
        return 2.0 * (-(-head_dim // 2) + -(-head_dim // BLOCK))
