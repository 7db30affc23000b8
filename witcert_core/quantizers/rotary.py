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
        latent_dim: leading channels that are the latent of all heads (multi-head latent attention), before the
            rotated ones; values are these channels of the key. 0 of a key of one head.

    Raises:
        InputError: ``rotary_dim`` odd, negative or larger than ``head_dim``; channels beside latent and rotated ones.

    Example:
        >>> import witcert_core as wc
        >>> wc.RotarySpec(head_dim=128, rotary_dim=64).dim
        64
    """

    head_dim: int
    rotary_dim: int | None = None
    interleaved: bool = False
    latent_dim: int = 0

    def __post_init__(self) -> None:
        if self.head_dim < 1:
            raise InputError(f"head_dim is {self.head_dim}; it must be at least 1")
        dim = self.dim
        if dim < 0 or dim > self.head_dim or dim % 2:
            raise InputError(f"rotary_dim is {dim}; it must be even and within 0..head_dim={self.head_dim}")
        if self.latent_dim and self.latent_dim + dim != self.head_dim:
            raise InputError(
                f"latent_dim is {self.latent_dim} beside {dim} rotated channels; together they must be "
                f"head_dim={self.head_dim}"
            )

    @property
    def parts(self) -> dict[str, slice]:
        """What a key is made of, by name: ``latent`` and ``rope``, or nothing for a key of one head."""
        if not self.latent_dim:
            return {}
        return {"latent": slice(0, self.latent_dim), "rope": slice(self.latent_dim, self.head_dim)}

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
            return self.latent_dim + torch.stack((2 * i, 2 * i + 1), dim=-1)
        return self.latent_dim + torch.stack((i, i + self.n_pairs), dim=-1)


@dataclass(frozen=True)
class RotaryTable:
    """An engine's own rotary embedding, from the table it looks cosines and sines up in.

    Args:
        spec: pairing of the channels.
        cos_sin: ``[POSITIONS, rotary_dim]`` float: cosines of all pairs, then sines (``cos_sin_cache`` of SGLang and
            vLLM). Both may carry a factor (``mscale`` of YaRN): it is part of :meth:`rotate` and taken off again by
            :meth:`unrotate`.

    Both turns are computed in float32. They are inverse to each other up to rounding only, which is why a witness is
    taken of what is stored in the end and never of what a quantizer saw.
    """

    spec: RotarySpec
    cos_sin: Tensor

    def __post_init__(self) -> None:
        if self.cos_sin.ndim != 2 or self.cos_sin.shape[1] != self.spec.dim:
            raise InputError(
                f"cos_sin has shape {tuple(self.cos_sin.shape)}; expected [POSITIONS, rotary_dim={self.spec.dim}]"
            )

    def mscale(self, positions: Tensor) -> Tensor:
        """How much :meth:`rotate` lengthens each pair, float32 ``[N, n_pairs]``: 1 without a factor."""
        cos, sin = self._angles(positions)
        return torch.hypot(cos, sin)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Keys as the model would hand them over, float32 ``[N, H, D]``, from keys before RoPE."""
        cos, sin = (t[:, None] for t in self._angles(positions))
        return self._turn(x, cos, sin)

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Keys before RoPE, float32 ``[N, H, D]``, from ``x [N, H, D]`` after it."""
        cos, sin = (t[:, None] for t in self._angles(positions))
        square = cos.square() + sin.square()
        return self._turn(x, cos / square, -sin / square)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < len(self.cos_sin):
            raise InputError(
                f"positions {int(positions.min())}..{int(positions.max())} are not all in the table's 0.."
                f"{len(self.cos_sin) - 1}"
            )
        cos, sin = self.cos_sin[positions].to(torch.float32).chunk(2, dim=-1)
        return cos, sin

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if x.shape[-1] != self.spec.head_dim:
            raise InputError(f"x has {x.shape[-1]} channels; this table is for head_dim={self.spec.head_dim}")
        pairs = self.spec.pair_channels().to(x.device)
        out = x.to(torch.float32, copy=True)
        a, b = out[..., pairs[:, 0]], out[..., pairs[:, 1]]
        out[..., pairs[:, 0]], out[..., pairs[:, 1]] = a * cos - b * sin, a * sin + b * cos
        return out
