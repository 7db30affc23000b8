"""KVQuant: keys before RoPE with a range per channel, non-uniform levels, and one percent of outliers kept.

Hooper et al., "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization", NeurIPS 2024,
arXiv:2401.18079.

What is taken from where, by the titles of the paper's sections: keys per channel and values per token, "Per-Channel Key
Quantization"; keys before RoPE, "Pre-RoPE Key Quantization"; levels placed by k-means over normalized values, "nuqX",
"Non-Uniform KV Cache Quantization"; outliers of every vector stored apart in 16 bit and left out of the range,
"Per-Vector Dense-and-Sparse Quantization"; the first token in 16 bit, "Attention Sink-Aware Quantization"; ranges of
keys fixed in advance, those of values taken token by token, the section on offline calibration and online computation.

Differences. The paper calibrates ranges and levels on a data set and weights k-means by Fisher information; here they
come from the first `calibration_tokens` of the request itself, unweighted, so no file has to be kept. A vector is what
one head has of a token, so every token and head keeps the same number of outliers and the bytes are known; the paper
takes a vector over all heads and keeps what lies beyond a threshold. The beginning of a request, unlike a data set,
does not show every range a key will need: a key that leaves the calibrated ranges by more than its outliers has them
stretched by one float16 of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from witcert_core import CalibratedQuantizer, CodedQuantizer, Part, QuantContext, QuantizerError, register
from witcert_kvquant.levels import fit_levels

_FP16_MAX = torch.finfo(torch.float16).max


@register
@dataclass(frozen=True)
class KVQuant(CodedQuantizer, CalibratedQuantizer):
    """146, 114 and 82 bytes of K and V at 4, 3 and 2 bit and head_dim 128 (of 512 in 16 bit), 2 outliers in each.

    bits: 2 to 4. outliers: share of the channels of a vector kept in 16 bit, rounded up to whole channels.
    """

    name: ClassVar[str] = "kvquant"
    space: ClassVar[Literal["post_rope", "pre_rope"]] = "pre_rope"
    bits: int = 4
    outliers: float = 0.01
    calibration_tokens: int = 64
    sink_tokens: int = 1

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("bits", self.bits, 2 <= self.bits <= 4),
            ("outliers", self.outliers, 0 <= self.outliers <= 0.25),
            ("calibration_tokens", self.calibration_tokens, self.calibration_tokens >= 16),
            ("sink_tokens", self.sink_tokens, self.sink_tokens >= 0),
        ):
            if not allowed:
                limits = "bits 2 to 4, outliers 0 to 0.25, calibration_tokens >= 16, sink_tokens >= 0"
                raise QuantizerError(f"quantizer 'kvquant': {name} is {value}; allowed: {limits}")

    # State: keys have centre [D], half range [D], levels [2^bits]; values have levels alone ---------------------

    def calibrate(self, x: Tensor, *, kind: str, layer: int, positions: Tensor, ctx: QuantContext) -> Tensor:
        if kind == "k":
            low, high = x.amin(0), x.amax(0)
            centre, half = middle(low, high)
            normal, _ = self._split((x - centre) / divisor(half))
            return torch.cat([centre, half, self._fit(normal)], -1)
        normal, _ = self._split(x)
        centre, half = middle(normal.nan_to_num(math.inf).amin(-1), normal.nan_to_num(-math.inf).amax(-1))
        return self._fit((normal - centre[..., None]) / divisor(half)[..., None])

    def _fit(self, normal: Tensor) -> Tensor:
        """Levels [H, 2^bits] for samples [N, H, D], in which the outliers are NaN."""
        return fit_levels(normal.transpose(0, 1).flatten(1), 2**self.bits)

    # Codes -------------------------------------------------------------------------------------------------------

    def encode(self, x: Tensor, *, kind: str, layer: int, positions: Tensor, ctx: QuantContext) -> Mapping[str, Part]:
        state, dim = self._state(ctx), x.shape[-1]
        parts: dict[str, Part] = {}
        if kind == "k":
            centre, half, levels = state[..., :dim], state[..., dim : 2 * dim], state[..., 2 * dim :]
            normal, index = self._split((x - centre) / divisor(half))
            stretch = normal.abs().nan_to_num(0.0).amax(-1, keepdim=True).clamp(1.0, _FP16_MAX).half()
            parts["stretch"] = Part(stretch, 16)
            normal = normal / stretch.float()
        else:
            levels = state
            rest, index = self._split(x)
            low, high = rest.nan_to_num(math.inf).amin(-1), rest.nan_to_num(-math.inf).amax(-1)
            centre, half = (t.clamp(-_FP16_MAX, _FP16_MAX).half() for t in middle(low, high))
            parts |= {"centre": Part(centre[..., None], 16), "half": Part(half[..., None], 16)}
            normal = (rest - centre.float()[..., None]) / divisor(half.float())[..., None]
        edges = ((levels[..., 1:] + levels[..., :-1]) / 2).contiguous()
        codes = torch.searchsorted(edges, normal.nan_to_num(0.0).contiguous())
        kept = x.gather(-1, index).clamp(-_FP16_MAX, _FP16_MAX).half()
        return parts | {
            "codes": Part(codes.to(torch.uint8), self.bits),
            "outlier_channel": Part(index, index_bits(dim)),
            "outlier_value": Part(kept, 16),
        }

    def decode(
        self, parts: Mapping[str, Part], *, kind: str, layer: int, positions: Tensor, ctx: QuantContext
    ) -> Tensor:
        state, codes = self._state(ctx), parts["codes"].values.long()
        dim = codes.shape[-1]
        if kind == "k":
            centre, half, levels = state[..., :dim], state[..., dim : 2 * dim], state[..., 2 * dim :]
            half = half * parts["stretch"].values.float()
        else:
            centre, half, levels = parts["centre"].values.float(), parts["half"].values.float(), state
        values = centre + half * levels.gather(-1, codes)
        return values.scatter(-1, parts["outlier_channel"].values, parts["outlier_value"].values.float())

    def bytes_per_token_head(self, head_dim: int) -> float:
        kept = self._num_outliers(head_dim)
        vector = -(-head_dim * self.bits // 8) + -(-kept * index_bits(head_dim) // 8) + 2 * kept
        return 2.0 * vector + 6

    def _num_outliers(self, dim: int) -> int:
        return math.ceil(self.outliers * dim)

    def _split(self, normal: Tensor) -> tuple[Tensor, Tensor]:
        """A copy of [N, H, D] with its largest magnitudes NaN, and their channels, int64 [N, H, outliers]."""
        order = normal.abs().argsort(dim=-1, descending=True, stable=True)
        index = order[..., : self._num_outliers(normal.shape[-1])]
        return normal.scatter(-1, index, math.nan), index

    def _state(self, ctx: QuantContext) -> Tensor:
        if ctx.state is None:
            raise QuantizerError("quantizer 'kvquant': the context has no state; call calibrate first")
        return ctx.state


def middle(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Centre and half width of a range."""
    return low / 2 + high / 2, high / 2 - low / 2


def divisor(half: Tensor) -> Tensor:
    """1 where a range is a point: whatever the code, its value is then the centre."""
    return torch.where(half == 0, 1.0, half)


def index_bits(dim: int) -> int:
    """Bits of a channel's number: a byte, or two beyond 256 channels."""
    return 8 if dim <= 256 else 16
