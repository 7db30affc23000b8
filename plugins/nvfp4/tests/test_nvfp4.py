"""NVFP4 by hand, and bit by bit against compressed-tensors."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor
from witcert_nvfp4 import NvFp4

from witcert_core import QuantContext, QuantizerError, RotarySpec


def run(quant: NvFp4, x: Tensor, kind: Literal["k", "v"] = "k") -> Tensor:
    ctx = QuantContext(tuple(range(x.shape[1])), x.shape[2], RotarySpec(x.shape[2]), torch.bfloat16)
    return quant.fake_quantize(x, kind=kind, layer=0, positions=torch.arange(len(x)), ctx=ctx)


def test_rounding_to_even_and_saturation_by_hand() -> None:
    """A block with amax 6 has scale 1: every tie of E2M1 goes to the even code."""
    given = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -5.0, 0.26, 0.74, -3.51, 4.99, 5.01]
    expected = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -1.0, -4.0, 0.5, 0.5, -4.0, 4.0, 6.0]
    assert run(NvFp4(), torch.tensor(given).reshape(1, 1, 16))[0, 0].tolist() == expected
    huge = torch.full((1, 1, 16), 1e4)
    assert (run(NvFp4(), huge) == 6 * 448).all()
    assert torch.equal(run(NvFp4(k_scale=4.0), huge), torch.full_like(huge, 6 * 416 * 4.0))  # 10000/6/4 = 416.7


def test_keys_and_values_have_their_own_tensor_scale() -> None:
    x = torch.full((1, 1, 16), 0.001)
    quant = NvFp4(k_scale=1e-3)
    assert (run(quant, x, "k") - x).abs().max() < 5e-5
    assert (run(quant, x, "v") == 0).all()  # 0.001 / 6 rounds to a zero E4M3 scale


@pytest.mark.parametrize("amax", [0.5, 30.0, 2000.0])
def test_as_compressed_tensors_does_it(amax: float) -> None:
    """The same scales and the same 4-bit numbers; their tensor scale is the reciprocal of ours."""
    args = pytest.importorskip("compressed_tensors.quantization.quant_args")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    x *= amax / x.abs().max()
    scheme = args.QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
    )
    factor = 2.0 ** round(torch.tensor(2688.0 / amax).log2().item() - 1)  # exactly invertible
    global_scale = torch.tensor([factor])
    blocks = x.unflatten(-1, (-1, 16))
    scale, zero = helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme, global_scale=global_scale)
    theirs = forward.fake_quantize(x, scale, zero, scheme, global_scale=global_scale)
    ours = run(NvFp4(k_scale=1 / factor), x[:, None])[:, 0]
    assert (ours - theirs).abs().max() < 1e-6 * amax
    assert len(ours.unique()) > 50


def test_limits() -> None:
    assert NvFp4().bytes_per_token_head(128) == 144
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(QuantizerError, match="v_scale"):
            NvFp4(v_scale=wrong)
