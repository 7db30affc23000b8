"""Calibrated FP8: the scale is the prefix's, head by head, and the codes are those of compressed-tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from witcert_fp8_calibrated import Fp8Calibrated

from witcert_core import QuantContext, QuantizerError, RotarySpec


def run(quant: Fp8Calibrated, prefix: Tensor, x: Tensor) -> Tensor:
    ctx = QuantContext(tuple(range(x.shape[1])), x.shape[2], RotarySpec(x.shape[2]), torch.bfloat16)
    state = quant.calibrate(prefix, kind="k", layer=0, positions=torch.arange(len(prefix)), ctx=ctx)
    ctx = replace(ctx, state=state.expand(len(x), -1, -1))
    return quant.fake_quantize(x, kind="k", layer=0, positions=torch.arange(len(x)), ctx=ctx)


def test_a_head_is_scaled_by_its_own_prefix_and_saturates_beyond_the_margin() -> None:
    prefix = torch.ones(64, 2, 16)
    prefix[:, 1] *= 1000.0
    x = torch.tensor([1.0, 1.5, 1.6, 100.0])[:, None, None].expand(4, 2, 16) * torch.tensor([1.0, 1000.0])[:, None]
    out = run(Fp8Calibrated(margin=1.5), prefix, x)
    assert torch.allclose(out[:, 0, 0], torch.tensor([1.0, 1.5, 1.5, 1.5]), rtol=0.05)
    assert torch.allclose(out[:, 1], 1000 * out[:, 0])


def test_values_beyond_448_survive_which_a_plain_cast_clips() -> None:
    prefix = torch.full((64, 1, 16), 2000.0)
    assert (run(Fp8Calibrated(), prefix, prefix) / prefix - 1).abs().max() < 0.07


def test_as_compressed_tensors_does_it() -> None:
    """Its E4M3 with one static scale per head: the same numbers when margin is 1 and the prefix is everything."""
    args = pytest.importorskip("compressed_tensors.quantization.quant_args")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    x = torch.randn(64, 3, 32, generator=torch.Generator().manual_seed(2)) * torch.tensor([0.01, 1.0, 900.0])[:, None]
    scheme = args.QuantizationArgs(num_bits=8, type="float", strategy="channel")
    rows = x.transpose(0, 1).flatten(1)
    scale, zero = helpers.calculate_qparams(rows.amin(1, keepdim=True), rows.amax(1, keepdim=True), scheme)
    theirs = forward.fake_quantize(rows, scale, zero, scheme).unflatten(1, (64, 32)).transpose(0, 1)
    assert torch.allclose(run(Fp8Calibrated(margin=1.0), x, x), theirs, rtol=1e-6, atol=0)


def test_limits() -> None:
    assert Fp8Calibrated().bytes_per_token_head(128) == 256
    for wrong in ({"margin": 0.5}, {"margin": float("nan")}, {"calibration_tokens": 0}):
        with pytest.raises(QuantizerError, match=next(iter(wrong))):
            Fp8Calibrated(**wrong)
    ctx = QuantContext((0,), 16, RotarySpec(16), torch.bfloat16)
    with pytest.raises(QuantizerError, match="no state"):
        Fp8Calibrated().fake_quantize(torch.zeros(1, 1, 16), kind="k", layer=0, positions=torch.zeros(1), ctx=ctx)
