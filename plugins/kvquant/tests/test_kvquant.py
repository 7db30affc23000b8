"""KVQuant: outliers kept, ranges per channel, levels where the values are."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Literal

import pytest
import torch
from torch import Tensor
from witcert_kvquant import KVQuant
from witcert_kvquant.levels import fit_levels

from witcert_core import QuantContext, QuantizerError, RotarySpec


def run(quant: KVQuant, prefix: Tensor, x: Tensor, kind: Literal["k", "v"] = "k", first: int = 100) -> Tensor:
    ctx = QuantContext(tuple(range(x.shape[1])), x.shape[2], RotarySpec(x.shape[2]), torch.bfloat16)
    state = quant.calibrate(prefix, kind=kind, layer=0, positions=torch.arange(len(prefix)), ctx=ctx)
    ctx = replace(ctx, state=state.expand(len(x), -1, -1))
    return quant.fake_quantize(x, kind=kind, layer=0, positions=torch.arange(len(x)) + first, ctx=ctx)


def keys(count: int, seed: int) -> Tensor:
    """Channels of very different centre and width, as keys before RoPE have."""
    generator = torch.Generator().manual_seed(seed)
    width = torch.logspace(-1, 1, 64)
    return torch.randn(count, 2, 64, generator=generator) * width + 5 * width.flip(0)


def test_channels_are_quantized_in_their_own_range() -> None:
    x = keys(200, 1)
    out = run(KVQuant(bits=4), keys(64, 0), x)
    relative = (out - x).square().mean((0, 1)).sqrt() / x.std((0, 1))
    assert relative.max() < 0.25
    assert relative.max() < 3 * relative.min()


@pytest.mark.parametrize("kind", ["k", "v"])
def test_outliers_come_back_in_16_bit_and_do_not_widen_the_range(kind: Literal["k", "v"]) -> None:
    prefix, x = keys(64, 0), keys(8, 1)
    spiked = x.clone()
    spiked[:, 0, 40] = 3000.0
    clean, out = run(KVQuant(outliers=0.03), prefix, x, kind), run(KVQuant(outliers=0.03), prefix, spiked, kind)
    assert (out[:, 0, 40] == 3000).all()
    assert (out[:, 0] - spiked[:, 0]).abs().max() <= 1.5 * (clean[:, 0] - x[:, 0]).abs().max() + 0.5
    without = run(KVQuant(outliers=0.0), prefix, spiked, kind)
    assert (without[:, 0] - spiked[:, 0]).abs().max() > 10 * (out[:, 0] - spiked[:, 0]).abs().max()


def test_a_key_beyond_the_calibrated_ranges_is_stretched_not_clipped() -> None:
    x = keys(8, 1)
    far = x - x.mean((0, 1)) + 8 * (x - x.mean((0, 1))) + x.mean((0, 1))
    out = run(KVQuant(), keys(64, 0), far)
    assert (out - far).norm() / (far - far.mean((0, 1))).norm() < 0.25
    assert torch.equal(run(KVQuant(), keys(64, 0), torch.cat([x, far]))[:8], run(KVQuant(), keys(64, 0), x))


def test_the_first_token_is_exact() -> None:
    x = keys(3, 2)
    out = run(KVQuant(), keys(64, 0), x, first=0)
    assert torch.equal(out[0], x[0])
    assert (out[1:] != x[1:]).any(-1).all()


def test_levels_are_where_the_values_are() -> None:
    """Two clusters and a stray: the mean squared error is that of the best of all partitions."""
    samples = torch.tensor([[-1.0, -0.98, -0.95, 0.4, 0.42, 0.5, 0.41, 0.9]])
    levels = fit_levels(samples, 3)
    found = (samples[0, :, None] - levels[0]).square().amin(1).sum()
    ordered = samples[0].sort().values
    best = min(
        sum(float((part - part.mean()).square().sum()) for part in (ordered[:i], ordered[i:j], ordered[j:]))
        for i, j in combinations(range(1, 8), 2)
    )
    assert float(found) == pytest.approx(best, abs=1e-6)


def test_levels_beat_uniform_ones_on_normal_values() -> None:
    samples = torch.randn(1, 20000, generator=torch.Generator().manual_seed(3))
    levels = fit_levels(samples, 8)[0]
    uniform = torch.linspace(float(samples.min()), float(samples.max()), 8)
    errors = [(samples[0, :, None] - grid).square().amin(1).mean() for grid in (levels, uniform)]
    assert errors[0] < 0.4 * errors[1]
    assert float(errors[0]) == pytest.approx(0.0345, abs=0.002)  # Lloyd-Max for a normal distribution at 8 levels


def test_heads_without_numbers_have_no_levels() -> None:
    samples = torch.stack([torch.full((10,), float("nan")), torch.linspace(0, 1, 10)])
    levels = fit_levels(samples, 4)
    assert levels[0].isnan().all()
    assert levels[1].isfinite().all()


def test_limits() -> None:
    assert [KVQuant(bits=b).bytes_per_token_head(128) for b in (4, 3, 2)] == [146, 114, 82]
    for wrong in ({"bits": 5}, {"outliers": 0.5}, {"calibration_tokens": 4}, {"sink_tokens": -1}):
        with pytest.raises(QuantizerError, match=next(iter(wrong))):
            KVQuant(**wrong)
