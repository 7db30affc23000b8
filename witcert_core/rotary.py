"""Which channels a rotary embedding turns together, and the rotation itself.

A witness taken before the rotation stays valid after it only if every band is a union of whole rotary
pairs, so the pairing is the one fact about RoPE that the meter depends on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.errors import InputError


@dataclass(frozen=True)
class RotarySpec:
    """Layout of the rotary part of one head.

    Args:
        head_dim: channels per head, ``D``.
        rotary_dim: leading channels that are rotated; ``None`` means all of them, 0 means none.
        interleaved: ``False`` pairs channel ``i`` with ``i + rotary_dim/2`` (GPT-NeoX, Llama, Qwen);
            ``True`` pairs ``2i`` with ``2i + 1`` (GPT-J).

    Raises:
        InputError: ``rotary_dim`` odd, negative or larger than ``head_dim``.
    """

    head_dim: int
    rotary_dim: int | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.head_dim < 1:
            raise InputError(f"head_dim is {self.head_dim}; it must be at least 1")
        dim = self.dim
        if dim < 0 or dim > self.head_dim or dim % 2:
            raise InputError(f"rotary_dim is {dim}; it must be even and within 0..head_dim={self.head_dim}")

    @property
    def dim(self) -> int:
        """Number of rotated channels."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def n_pairs(self) -> int:
        """Number of rotated pairs."""
        return self.dim // 2

    def pair_channels(self) -> Tensor:
        """Channels of each pair, int64 ``[n_pairs, 2]``."""
        i = torch.arange(self.n_pairs)
        if self.interleaved:
            return torch.stack((2 * i, 2 * i + 1), dim=-1)
        return torch.stack((i, i + self.n_pairs), dim=-1)

    def inv_freq(self, base: float = 10000.0) -> Tensor:
        """Angular frequencies ``base^(-2i/rotary_dim)``, float64 ``[n_pairs]``."""
        i = torch.arange(self.n_pairs, dtype=torch.float64)
        return torch.pow(torch.tensor(base, dtype=torch.float64), -2.0 * i / max(self.dim, 1))

    def rotate(
        self, x: Tensor, positions: Tensor, inv_freq: Tensor | None = None, *, inverse: bool = False
    ) -> Tensor:
        """Rotate every pair of ``x`` by ``position * inv_freq`` (``inverse`` turns it back).

        Args:
            x: ``[N, H, D]``, any float dtype; the result has the same dtype.
            positions: int64 ``[N]``.
            inv_freq: float64 ``[n_pairs]``, default :meth:`inv_freq`.
        """
        if x.shape[-1] != self.head_dim:
            raise InputError(f"x has {x.shape[-1]} channels; this RotarySpec is for head_dim={self.head_dim}")
        freq = self.inv_freq() if inv_freq is None else inv_freq
        angle = positions.to(torch.float64)[:, None] * freq.to(torch.float64)[None, :]
        cos, sin = angle.cos()[:, None, :], angle.sin()[:, None, :]
        if inverse:
            sin = -sin
        pairs = self.pair_channels().to(x.device)
        out = x.clone()
        a, b = x[..., pairs[:, 0]].to(torch.float64), x[..., pairs[:, 1]].to(torch.float64)
        out[..., pairs[:, 0]] = (a * cos - b * sin).to(x.dtype)
        out[..., pairs[:, 1]] = (a * sin + b * cos).to(x.dtype)
        return out
