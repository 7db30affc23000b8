"""Partitions of a head's channels over which residual norms are kept.

Cauchy-Schwarz holds band by band for any partition, so a post-RoPE witness is sound whatever the map.
Bands made of whole rotary pairs also survive a rotation.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.quantizers.dither import GROUP
from witcert_core.quantizers.rotary import RotarySpec

DIFFERENCE_UP = 1.0 + 2.0**-23
"""Covers the float32 rounding of a difference, twice over."""


@dataclass(frozen=True)
class BandMap:
    """A partition of ``D`` channels into ``num_bands`` bands.

    Args:
        channel_band: int64 ``[D]``, the band of each channel, each band used at least once.
        num_bands: ``B``.
    """

    channel_band: Tensor
    num_bands: int

    def __post_init__(self) -> None:
        used = torch.unique(self.channel_band)
        if self.channel_band.dim() != 1 or used.tolist() != list(range(self.num_bands)):
            raise InputError(
                f"channel_band uses bands {used.tolist()}; it must be one-dimensional and use every band "
                f"in 0..{self.num_bands - 1}"
            )

    @property
    def head_dim(self) -> int:
        """Number of channels ``D``."""
        return int(self.channel_band.numel())

    def norms(self, x: Tensor) -> Tensor:
        """Euclidean norm of ``x [..., D]`` in each band, float64 ``[..., B]``.

        NaN or infinity in a channel makes its band NaN or infinite. Where a square could be lost to under- or
        overflow, values are scaled by the band's largest magnitude first.
        """
        self._check(x)
        value = x.to(torch.float64)
        squares: Tensor = value.square() @ self._members.to(x.device)
        # A sum in this range has lost at most squares below 1e-308; 0 * NaN spoils the other bands too.
        if bool(((squares > 1e-250) & (squares < 1e250)).all()):
            return squares.sqrt()
        value = value.abs()
        index = self.channel_band.to(x.device).expand(value.shape)
        zeros = torch.zeros(*x.shape[:-1], self.num_bands, dtype=torch.float64, device=x.device)
        peak = zeros.scatter_reduce(-1, index, value, "amax")
        unit = torch.where((peak > 0) & peak.isfinite(), peak, torch.ones_like(peak))
        total = zeros.scatter_add(-1, index, (value / unit.gather(-1, index)).square())
        return total.sqrt() * unit

    def difference_norms(self, x: Tensor, y: Tensor) -> Tensor:
        """Norm of ``x - y`` in each band, float64 ``[..., B]``, rounded up, in few operations.

        Both ``[..., D]`` and of at most 32 bits an element: squares of their differences stay in float64's range.
        NaN or infinity in a channel makes its band NaN or infinite.
        """
        self._check(x)
        for operand in (x, y):
            if operand.element_size() > 4:
                raise InputError(f"an operand has dtype {operand.dtype}; squares are safe for at most 32 bits")
        # The difference of two floats is rounded once, by at most 2^-24 of itself.
        difference = (x.to(torch.float32) - y.to(torch.float32)).to(torch.float64)
        if self._grid is None:
            total: Tensor = difference.square() @ self._members.to(x.device)
            if not bool(total.isfinite().all()):  # 0 * NaN has spoiled the other bands too
                return self.norms(difference) * DIFFERENCE_UP
        else:
            parts, width = self._grid
            total = difference.square_().reshape(*x.shape[:-1], parts, self.num_bands, width).sum(-1)
            total = total.sum(-2) if parts > 1 else total.squeeze(-2)
        return total.sqrt().mul_(DIFFERENCE_UP)

    def _check(self, x: Tensor) -> None:
        if x.shape[-1] != self.head_dim:
            raise InputError(f"x has {x.shape[-1]} channels; this band map is for {self.head_dim}")

    @functools.cached_property
    def _grid(self) -> tuple[int, int] | None:
        """(P, W) where the channels are P times the bands in order, each W wide; None for other maps.

        That of rotary pairs ``(i, i + D / 2)`` has P = 2, that of neighbours P = 1.
        """
        runs, lengths = torch.unique_consecutive(self.channel_band, return_counts=True)
        parts, rest = divmod(runs.numel(), self.num_bands)
        if rest or lengths.unique().numel() > 1:
            return None
        in_order = torch.arange(self.num_bands).repeat(parts)
        return (parts, int(lengths[0])) if torch.equal(runs.cpu(), in_order) else None

    @functools.cached_property
    def _members(self) -> Tensor:
        """Float64 ``[D, B]``, 1 where the channel is of the band."""
        return torch.nn.functional.one_hot(self.channel_band, self.num_bands).to(torch.float64)


def band_map(spec: RotarySpec, num_bands: int = 16) -> BandMap:
    """Bands of rotary pairs: pair ``i`` goes to band ``floor(i * B / n_pairs)``.

    Channels that RoPE does not touch form bands of their own after the rotary ones, as many as keeps
    their width near that of a rotary band. Fewer than ``num_bands`` pairs give one pair per band.

    Of a latent cache a band is of neighbours in the latent or of neighbours in the rotated part: at least ``num_bands``
    bands, of the largest power of two of channels that gives so many.
    """
    if num_bands < 1:
        raise InputError(f"num_bands is {num_bands}; it must be at least 1")
    if spec.latent_dim:
        width = 1 << max((spec.head_dim // num_bands).bit_length() - 1, 0)
        ends = [(part.stop - part.start, -(-(part.stop - part.start) // width)) for part in spec.parts.values()]
        starts = itertools.accumulate((bands for _, bands in ends), initial=0)
        of_parts = [first + torch.arange(size) // width for first, (size, _) in zip(starts, ends, strict=False)]
        return BandMap(torch.cat(of_parts), sum(bands for _, bands in ends))
    channel_band = torch.empty(spec.head_dim, dtype=torch.int64)
    rotary_bands = min(num_bands, spec.n_pairs)
    pairs = spec.pair_channels()
    if rotary_bands:
        band = torch.arange(spec.n_pairs) * rotary_bands // spec.n_pairs
        channel_band[pairs.reshape(-1)] = band.repeat_interleave(2)
    rest = spec.head_dim - spec.dim
    total = rotary_bands
    if rest:
        width = -(-spec.dim // rotary_bands) if rotary_bands else -(-rest // min(num_bands, rest))
        extra = -(-rest // width)
        channel_band[spec.dim :] = rotary_bands + torch.arange(rest) * extra // rest
        total += extra
    return BandMap(channel_band, total)


@functools.lru_cache(maxsize=64)
def group_map(head_dim: int, group: int = GROUP) -> BandMap:
    """Bands of ``group`` consecutive channels; the last may be short."""
    if head_dim < 1 or group < 1:
        raise InputError(f"head_dim={head_dim} and group={group} must both be at least 1")
    return BandMap(torch.arange(head_dim) // group, -(-head_dim // group))
