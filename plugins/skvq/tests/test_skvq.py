"""SKVQ: like channels share a group, clipping pays, and what is kept exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from witcert_skvq import ALPHAS, Skvq

from witcert_core import QuantContext, QuantizerError, RotarySpec


def context(x: Tensor) -> QuantContext:
    return QuantContext(tuple(range(x.shape[1])), x.shape[2], RotarySpec(x.shape[2]), torch.bfloat16)


def state_of(quant: Skvq, prefix: Tensor) -> Tensor:
    return quant.calibrate(prefix, kind="k", layer=0, positions=torch.arange(len(prefix)), ctx=context(prefix))


def run(quant: Skvq, state: Tensor, x: Tensor, first: int = 100) -> Tensor:
    ctx = replace(context(x), state=state.expand(len(x), -1, -1))
    return quant.fake_quantize(x, kind="k", layer=0, positions=torch.arange(len(x)) + first, ctx=ctx)


def channels(count: int, seed: int) -> Tensor:
    """Wide and narrow channels in turn: consecutive ones are never alike."""
    x = torch.randn(count, 2, 64, generator=torch.Generator().manual_seed(seed))
    return x * torch.where(torch.arange(64) % 2 == 0, 10.0, 0.1)


def error(out: Tensor, x: Tensor) -> float:
    """Squared error of a channel relative to its own spread, averaged."""
    return float(((out - x).square().mean((0, 1)) / x.var((0, 1))).mean())


def test_channels_of_like_range_share_a_group() -> None:
    quant, x = Skvq(bits=4, group_size=32), channels(100, 1)
    state = state_of(quant, channels(64, 0))
    order = state[0, 1:65].long()
    assert set(order[:32].tolist()) == set(range(1, 64, 2))
    ordered = error(run(quant, state, x), x)
    plain = state.clone()
    plain[:, 1:65] = torch.arange(64.0)
    assert ordered < 0.05 * error(run(quant, plain, x), x)


def test_clipping_lowers_the_squared_error_it_was_chosen_for() -> None:
    quant, prefix = Skvq(bits=2), torch.randn(64, 2, 64, generator=torch.Generator().manual_seed(2))
    state = state_of(quant, prefix)
    unclipped = state.clone()
    unclipped[:, 65:] = 1.0
    assert set(state[:, 65:].flatten().tolist()) <= {float(torch.tensor(a)) for a in ALPHAS}
    errors = [float((run(quant, s, prefix) - prefix).square().mean()) for s in (state, unclipped)]
    assert errors[0] < 0.9 * errors[1]


def test_heads_far_beyond_e4m3_are_brought_into_its_range() -> None:
    x = torch.randn(80, 2, 64, generator=torch.Generator().manual_seed(3))
    quant = Skvq(bits=4)
    outs = [run(quant, state_of(quant, (s * x)[:64]), s * x) / s for s in (1.0, 2.0**15, 2.0**-15)]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_groups_far_from_zero_keep_their_place() -> None:
    x = 100 + torch.rand(80, 2, 64, generator=torch.Generator().manual_seed(5))
    for bits in (2, 4):
        quant = Skvq(bits=bits)
        assert ((run(quant, state_of(quant, x[:64]), x) - x) / x).abs().max() < 0.07
    constant = torch.full((80, 2, 64), -3.0)
    assert (run(Skvq(), state_of(Skvq(), constant[:64]), constant) / constant - 1).abs().max() < 0.07


def test_first_and_recent_tokens() -> None:
    x = channels(10, 4)
    quant = Skvq(sink_tokens=3, window=7)
    out = run(quant, state_of(quant, channels(64, 0)), x, first=0)
    assert torch.equal(out[:3], x[:3])
    assert (out[3:] != x[3:]).flatten(1).any(1).all()
    assert quant.recent_tokens == 7


def test_limits() -> None:
    assert [Skvq(bits=b).bytes_per_token_head(128) for b in (4, 3, 2)] == [144, 112, 80]
    for wrong in ({"bits": 1}, {"group_size": 0}, {"window": -1}, {"calibration_tokens": 0}, {"sink_tokens": -1}):
        with pytest.raises(QuantizerError, match=next(iter(wrong))):
            Skvq(**wrong)
