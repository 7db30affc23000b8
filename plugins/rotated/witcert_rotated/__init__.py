"""A random rotation, then the best scalar codebook for what comes out: the TurboQuant and QuaRot family.

Zandieh et al., "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate", arXiv:2504.19874: after a
random rotation the coordinates of a vector on the sphere have the density (1 - x^2)^((D-3)/2) whatever the vector was
(the lemma on a random point on the hypersphere), so one Lloyd-Max codebook for that density serves all (algorithm 1,
the section on the MSE-optimal quantizer, Q_mse); the norm is stored beside the codes. Expected squared error, relative:
0.36, 0.117, 0.03, 0.009 at 1 to 4 bit (the theorem of that section).
Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", NeurIPS 2024, arXiv:2404.00456: a randomized
Hadamard matrix as the rotation (the background section), applied to the heads of values and keys (the stages of the
method section on the attention's values and keys).

Not taken: TurboQuant's Q_prod, which spends a bit on an unbiased sketch of the residual (the section on inner
products), and its split into outlier channels with more bits (the experiments on KV caches).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from witcert_core import CodedQuantizer, Part, QuantContext, QuantizerError, register

MAX_BITS = 4
_GRID = 1 << 15


@register
@dataclass(frozen=True)
class Rotated(CodedQuantizer):
    """66 bytes for a key or value of head_dim 128 at 4 bit, 34 at 2 bit (of 256 in 16 bit).

    bits: 1 to 4. seed: of the random signs, the same for all layers and heads.
    """

    name: ClassVar[str] = "rotated"
    bits: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= MAX_BITS:
            raise QuantizerError(f"quantizer 'rotated': bits is {self.bits}; allowed: 1 to {MAX_BITS}")

    def encode(self, x: Tensor, *, kind: str, layer: int, positions: Tensor, ctx: QuantContext) -> Mapping[str, Part]:
        dim = x.shape[-1]
        spread = rotate(x * self._signs(dim, x.device))
        # Scaled down before squaring, so that neither large nor tiny vectors are lost.
        peak = spread.abs().amax(-1, keepdim=True)
        unit = torch.where(peak > 0, peak, 1.0)
        rms = ((tree_sum((spread / unit).square()) / dim).sqrt() * unit).clamp(max=65504.0).half()
        scale = torch.where(rms == 0, 1.0, rms.float())
        edges = codebook_edges(dim, self.bits).to(x.device)
        codes = torch.bucketize((spread / scale).contiguous(), edges)
        return {"codes": Part(codes.to(torch.uint8), self.bits), "rms": Part(rms.squeeze(-1), 16)}

    def decode(
        self, parts: Mapping[str, Part], *, kind: str, layer: int, positions: Tensor, ctx: QuantContext
    ) -> Tensor:
        codes = parts["codes"].values
        levels = codebook(codes.shape[-1], self.bits).to(codes.device)
        spread = levels[codes.long()] * parts["rms"].values.float()[..., None]
        return rotate(spread) * self._signs(codes.shape[-1], codes.device)

    def bytes_per_token_head(self, head_dim: int) -> float:
        return 2.0 * (-(-head_dim * self.bits // 8) + 2)

    def _signs(self, dim: int, device: torch.device) -> Tensor:
        return random_signs(dim, self.seed).to(device)


@lru_cache(maxsize=32)
def random_signs(dim: int, seed: int) -> Tensor:
    """+1 and -1, float32 [D]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (dim,), generator=generator).float() * 2 - 1


def rotate(x: Tensor) -> Tensor:
    """x [..., D] times an orthogonal symmetric matrix, its own inverse.

    For D a power of two it is the Hadamard matrix in Sylvester's order; else D = m 2^k with m odd, and the m blocks are
    mixed by a Hartley matrix, cas(2 pi i j / m) / sqrt(m). Sums are taken in a fixed order, element by element, so that
    a vector alone gives the same bits as in any batch, which a matrix product does not promise.
    """
    dim = x.shape[-1]
    odd = dim
    while odd % 2 == 0:
        odd //= 2
    half = 1
    y = x
    while half * odd < dim:
        a, b = torch.unflatten(y, -1, (-1, 2, half)).unbind(-2)
        y = torch.stack((a + b, a - b), -2).flatten(-3)
        half *= 2
    blocks = torch.unflatten(y, -1, (odd, half))
    weights = hartley(odd) * half**-0.5
    mixed = [sum(float(weights[i, j]) * blocks[..., j, :] for j in range(odd)) for i in range(odd)]
    return torch.stack([torch.as_tensor(block) for block in mixed], -2).flatten(-2)


@lru_cache(maxsize=32)
def hartley(size: int) -> Tensor:
    """The discrete Hartley matrix, float64 [size, size]: symmetric and orthogonal; 1 for size 1."""
    index = torch.arange(size, dtype=torch.float64)
    angle = 2 * torch.pi * torch.outer(index, index) / size
    matrix: Tensor = (angle.cos() + angle.sin()) / size**0.5
    return matrix


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, kept as 1, halves added element by element (the same bits in any batch)."""
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = torch.nn.functional.pad(x, (0, 1))
        x = x[..., ::2] + x[..., 1::2]
    return x


@lru_cache(maxsize=32)
def codebook(dim: int, bits: int) -> Tensor:
    """Lloyd-Max levels, float32 [2^bits] rising, for a coordinate of a random point on the sphere of radius sqrt(D).

    Lloyd's two conditions (levels are means of their cells, edges are midpoints) are iterated; mass and first moment of
    a cell come from a fine grid, linear between its points.
    """
    reach = min(dim**0.5, 8.0)
    step = 2 * reach / _GRID
    grid = -reach + step * (torch.arange(_GRID, dtype=torch.float64) + 0.5)
    density = (1 - grid.square() / dim).clamp(min=0).pow(max(dim - 3, 0) / 2)
    sums = torch.nn.functional.pad(torch.stack([density, density * grid]).cumsum(1), (1, 0))
    ends = torch.tensor([[0.0], [float(_GRID)]], dtype=torch.float64)
    levels = torch.linspace(-2, 2, 2**bits, dtype=torch.float64)
    for _ in range(5000):
        middles = ((levels[1:] + levels[:-1]) / 2 + reach) / step
        cuts = torch.cat([ends[0], middles, ends[1]])
        below = cuts.floor().clamp(max=_GRID - 1)
        share, index = cuts - below, below.long()
        mass, moment = (sums[:, index] * (1 - share) + sums[:, index + 1] * share).diff(dim=1)
        new = moment / mass
        done = float((new - levels).abs().max()) < 1e-9
        levels = (new - new.flip(0)) / 2  # symmetric, as the density is
        if done:
            break
    return levels.float()


def codebook_edges(dim: int, bits: int) -> Tensor:
    """Midpoints between the levels, float32 [2^bits - 1]."""
    levels = codebook(dim, bits)
    return (levels[1:] + levels[:-1]) / 2
