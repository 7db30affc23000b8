"""SKVQ: channels of like range in one group, clipped scales in FP8, a sliding window and the first tokens exact.

Duanmu et al., "SKVQ: Sliding-window Key and Value Cache Quantization for Large Language Models", COLM 2024,
arXiv:2405.06219.

What is taken from where: channels reordered so that those of a group have like ranges, and a clipping factor alpha for
every group that lowers the squared error there, both from the section on clipped dynamic quantization with channel
reorder; a window of recent tokens and the first few ("attention sinks") in full precision, from the section on the
sliding window; scales and zero-points in E4M3, from the description of the experiments.

Differences. The paper finds order and alpha on a data set and folds the order into the weights; here both come from the
first `calibration_tokens` of the request, so no file has to be kept. Groups have `group_size` channels of one head,
where the paper's may span heads. A value as zero-point would be off by up to a sixteenth of itself in E4M3; here it is
a whole number of levels, at most 16, which E4M3 has exactly. E4M3 ends at 448, so a head's values are first brought
into its range by one factor for the whole request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from witcert_core import CalibratedQuantizer, CodedQuantizer, Part, QuantContext, QuantizerError, register

E4M3_MAX = 448.0
FARTHEST = 15.0
"""Levels between zero and the far end of a group, at most."""
UNITS = 64.0
"""What the largest magnitude of the calibration becomes: scales then have room both ways."""
ALPHAS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)


@register
@dataclass(frozen=True)
class Skvq(CodedQuantizer, CalibratedQuantizer):
    """80 bytes of K and V at 2 bit and head_dim 128 (of 512 in 16 bit), without the exact tokens.

    bits: 2 to 4. group_size: channels that share scale and zero-point. window, sink_tokens: newest and first tokens
    that stay exact.
    """

    name: ClassVar[str] = "skvq"
    bits: int = 2
    group_size: int = 32
    window: int = 128
    sink_tokens: int = 5
    calibration_tokens: int = 64

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("bits", self.bits, 2, 4),
            ("group_size", self.group_size, 1, 1024),
            ("window", self.window, 0, 1 << 20),
            ("sink_tokens", self.sink_tokens, 0, 1 << 20),
            ("calibration_tokens", self.calibration_tokens, 1, 1 << 20),
        ):
            if not least <= value <= most:
                raise QuantizerError(f"quantizer 'skvq': {name} is {value}; allowed: {least} to {most}")

    @property
    def recent_tokens(self) -> int:
        return self.window

    def calibrate(self, x: Tensor, *, kind: str, layer: int, positions: Tensor, ctx: QuantContext) -> Tensor:
        """State [H, 1 + D + groups]: the head's unit, the channel at each place of the order, alpha of each group."""
        unit = x.abs().amax((0, 2)) / UNITS
        unit = torch.where(unit == 0, 1.0, unit)[:, None]
        x = x / unit
        spread = x.amax(0) - x.amin(0)
        order = spread.argsort(dim=-1, stable=True)
        groups = self._in_groups(x.gather(-1, order.expand(len(x), -1, -1)))
        alphas = torch.tensor(ALPHAS, device=x.device)
        # Squared error of every factor, [alphas, H, groups]; a NaN is left to the tokens themselves.
        errors = torch.stack([self._error(groups, float(alpha)) for alpha in ALPHAS]).nan_to_num(0.0)
        return torch.cat([unit, order.float(), alphas[errors.argmin(0)]], -1)

    def _error(self, groups: Tensor, alpha: float) -> Tensor:
        factor = torch.full(groups.shape[:-1], alpha, device=groups.device)
        values = levels_of(*affine(groups, factor, self.bits))
        # Token by token, so that no head's sum depends on how many heads there are.
        return sum_over_tokens((values - groups).square().movedim(-1, 1).flatten(0, 1))

    def encode(self, x: Tensor, *, kind: str, layer: int, positions: Tensor, ctx: QuantContext) -> Mapping[str, Part]:
        dim = x.shape[-1]
        unit, order, alpha = self._state(ctx, dim)
        codes, scale, zero = affine(self._in_groups((x / unit).gather(-1, order)), alpha, self.bits)
        codes = codes.flatten(2)[..., :dim]
        return {"codes": Part(codes, self.bits), "scale": Part(scale, 8), "zero": Part(zero, 8)}

    def decode(
        self, parts: Mapping[str, Part], *, kind: str, layer: int, positions: Tensor, ctx: QuantContext
    ) -> Tensor:
        codes = parts["codes"].values
        dim = codes.shape[-1]
        unit, order, _ = self._state(ctx, dim)
        scale, zero = parts["scale"].values, parts["zero"].values
        values = levels_of(self._in_groups(codes), scale, zero).flatten(2)[..., :dim]
        return torch.empty_like(values).scatter(-1, order, values) * unit

    def bytes_per_token_head(self, head_dim: int) -> float:
        return 2.0 * (-(-head_dim * self.bits // 8) + 2 * -(-head_dim // self.group_size))

    def _in_groups(self, x: Tensor) -> Tensor:
        """x [N, H, D] as [N, H, groups, group_size]; the last channel repeated fills a short group harmlessly."""
        short = -x.shape[-1] % self.group_size
        full = torch.cat([x, x[..., -1:].expand(-1, -1, short)], -1) if short else x
        return torch.unflatten(full, -1, (-1, self.group_size))

    def _state(self, ctx: QuantContext, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Unit [N, H, 1], order int64 [N, H, D] and alpha [N, H, groups]."""
        if ctx.state is None:
            raise QuantizerError("quantizer 'skvq': the context has no state; call calibrate first")
        return ctx.state[..., :1], ctx.state[..., 1 : dim + 1].long(), ctx.state[..., dim + 1 :]


def affine(groups: Tensor, alpha: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [..., size], scale and zero-point float8_e4m3fn [...] of groups [..., size].

    alpha [...] clips their range.
    """
    low, high = groups.amin(-1) * alpha, groups.amax(-1) * alpha
    # E4M3 has every whole number up to 16: a narrow group far from zero gets wider levels, not a wrong zero-point.
    wanted = torch.maximum((high - low) / (2**bits - 1), torch.maximum(low.abs(), high.abs()) / FARTHEST)
    scale = wanted.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    step = torch.where(scale.float() == 0, 1.0, scale.float())
    zero = (-low / step).round().clamp(-16, 16).to(torch.float8_e4m3fn)
    codes = (groups / step[..., None] + zero.float()[..., None]).round().clamp(0, 2**bits - 1)
    return codes.nan_to_num(0).to(torch.uint8), scale, zero


def levels_of(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Values of codes [..., size]."""
    return (codes.float() - zero.float()[..., None]) * scale.float()[..., None]


def sum_over_tokens(x: Tensor) -> Tensor:
    """Sum of x [N, ...] over N, halves added element by element, so in an order that is the same for any shape."""
    while len(x) > 1:
        if len(x) % 2:
            x = torch.cat([x, torch.zeros_like(x[:1])])
        x = x[::2] + x[1::2]
    return x[0]
