"""The rotation and the codebook against what is published about them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from witcert_rotated import Rotated, codebook, hartley, rotate

from witcert_core import QuantContext, QuantizerError, RotarySpec

MAX_1960 = {  # J. Max, "Quantizing for minimum distortion", table I: positive levels for a normal distribution
    1: [0.7980],
    2: [0.4528, 1.510],
    3: [0.2451, 0.7560, 1.344, 2.152],
    4: [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733],
}
TURBOQUANT = {1: 0.36, 2: 0.117, 3: 0.03, 4: 0.009}  # theorem 1: E ||x - x~||^2 for unit x


def run(quant: Rotated, x: Tensor) -> Tensor:
    ctx = QuantContext(tuple(range(x.shape[1])), x.shape[2], RotarySpec(x.shape[2]), torch.bfloat16)
    return quant.fake_quantize(x, kind="k", layer=0, positions=torch.arange(len(x)), ctx=ctx)


@pytest.mark.parametrize("bits", MAX_1960)
def test_the_codebook_is_lloyds(bits: int) -> None:
    """For large D a coordinate is normal: Max's table. It is symmetric and rising for any D."""
    assert torch.allclose(codebook(1 << 16, bits)[2 ** (bits - 1) :], torch.tensor(MAX_1960[bits]), atol=6e-4)
    levels = codebook(64, bits)
    assert torch.equal(levels, -levels.flip(0))
    assert (levels.diff() > 0).all()


@pytest.mark.parametrize("bits", TURBOQUANT)
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_distortion_is_as_published_whatever_the_vector(bits: int, dim: int) -> None:
    """Relative squared error of vectors with outlier channels, averaged over rotations."""
    x = torch.randn(64, 1, dim, generator=torch.Generator().manual_seed(0))
    x[..., ::8] *= 10.0
    errors = [(run(Rotated(bits=bits, seed=s), x) - x).square().sum() / x.square().sum() for s in range(20)]
    assert float(torch.stack(errors).mean()) == pytest.approx(TURBOQUANT[bits], rel=0.2)


@pytest.mark.parametrize("dim", [1, 16, 20, 64, 80, 96, 128, 240])
def test_the_rotation_is_orthogonal_and_its_own_inverse(dim: int) -> None:
    matrix = rotate(torch.eye(dim, dtype=torch.float64))
    assert torch.allclose(matrix @ matrix.T, torch.eye(dim, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(matrix, matrix.T, atol=1e-12)
    assert torch.allclose(hartley(5) @ hartley(5), torch.eye(5, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("dim", [16, 64, 128])
def test_the_rotation_is_compressed_tensors_hadamard_matrix(dim: int) -> None:
    utils = pytest.importorskip("compressed_tensors.transform.utils.hadamard")
    theirs = utils.deterministic_hadamard_matrix(dim, torch.float64) / dim**0.5
    assert torch.allclose(rotate(torch.eye(dim, dtype=torch.float64)), theirs, atol=1e-12)


def test_limits() -> None:
    with pytest.raises(QuantizerError, match="bits is 5; allowed: 1 to 4"):
        Rotated(bits=5)
    assert Rotated(bits=2).bytes_per_token_head(128) == 68
