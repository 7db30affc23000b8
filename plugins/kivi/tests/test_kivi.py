"""KIVI by hand, and against optimum-quanto, the quantization that transformers offers as its KIVI-like cache."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor
from witcert_kivi import GROUP, Kivi

from witcert_core import QuantContext, QuantizerError, RotarySpec


def run(quant: Kivi, x: Tensor, kind: Literal["k", "v"]) -> Tensor:
    ctx = QuantContext(tuple(range(x.shape[1])), x.shape[2], RotarySpec(x.shape[2]), torch.bfloat16)
    return quant.fake_quantize(x, kind=kind, layer=0, positions=torch.arange(len(x)), ctx=ctx)


def test_by_hand() -> None:
    """Keys: 0, 1, ..., 31 along a channel, scale 31/3 in fp16. Values: the same along a token."""
    ramp = torch.arange(32.0)
    levels = torch.tensor(31 / 3).half().float() * torch.arange(4)
    nearest = levels[(ramp[:, None] - levels).abs().argmin(1)]
    keys = ramp[:, None, None].expand(32, 1, 16)
    assert torch.equal(run(Kivi(), keys, "k")[:, 0, 0], nearest)
    assert torch.equal(run(Kivi(), ramp.expand(32, 1, 32), "v")[5, 0], nearest)
    assert torch.equal(run(Kivi(), keys, "v"), keys)  # constant along each token


def test_an_outlier_channel_costs_the_others_nothing_in_keys() -> None:
    x = torch.randn(64, 1, 64, generator=torch.Generator().manual_seed(0))
    with_outlier = x.clone()
    with_outlier[..., 7] = 1000.0
    kept = torch.arange(64) != 7
    assert torch.equal(run(Kivi(), with_outlier, "k")[..., kept], run(Kivi(), x, "k")[..., kept])
    assert not torch.equal(run(Kivi(), with_outlier, "v")[..., kept], run(Kivi(), x, "v")[..., kept])


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("kind", ["k", "v"])
def test_as_optimum_quanto_does_it(bits: int, kind: Literal["k", "v"]) -> None:
    """The same codes from the same min-max scales, keys per channel and values per token, but for fp16 scales here."""
    quanto = pytest.importorskip("optimum.quanto")
    x = torch.randn(GROUP * 4, 2, 64, generator=torch.Generator().manual_seed(bits))
    ours = run(Kivi(bits=bits), x, kind)
    # quanto groups the last dimension of a matrix: a row is a channel over tokens, or a token over channels.
    rows = x.permute(1, 2, 0).reshape(-1, GROUP * 4) if kind == "k" else x.reshape(-1, 64)
    qtype = {2: quanto.qint2, 4: quanto.qint4}[bits]
    scale, shift = quanto.MaxOptimizer()(rows, qtype=qtype, axis=0, group_size=GROUP)
    codes = torch.ops.quanto.quantize_affine(rows, bits, 0, GROUP, scale, shift)
    theirs = codes.float() * scale - shift
    theirs = theirs.reshape(rows.shape)
    theirs = theirs.reshape(2, 64, -1).permute(2, 0, 1) if kind == "k" else theirs.reshape(x.shape)
    step = float(scale.max())
    assert ((ours - theirs).abs() > 2**-9 * step * 2**bits).float().mean() < 0.01  # a value on an edge
    assert (ours - theirs).abs().max() < 1.01 * step


def test_recent_tokens_and_limits() -> None:
    assert Kivi().recent_tokens == 96
    assert Kivi(residual=32).recent_tokens == 0
    assert Kivi(bits=4).bytes_per_token_head(128) == 160
    for wrong in ({"bits": 3}, {"residual": 48}, {"residual": 0}, {"group_size": 0}):
        with pytest.raises(QuantizerError, match=next(iter(wrong))):
            Kivi(**wrong)
