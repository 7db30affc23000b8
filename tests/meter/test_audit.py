"""The second audit: the engine's own output against attention over what is stored, for every way to attend wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from witcert_core.evaluate.offline.attention import causal_attention
from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.audit import compare_rows, output_excess, true_tv

HQ, HKV, D, S = 4, 2, 64, 90
SCALE = D**-0.5
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


def drawn(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return tuple((torch.randn(n, h, D, generator=gen) * 2).to(dtype) for n, h in ((1, HQ), (S, HKV), (S, HKV)))  # type: ignore[return-value]


def excess(spec: AttentionSpec, made: dict[str, Any], dtype: torch.dtype = torch.float32) -> Tensor:
    """Of one row that an engine attended as `made` says, audited as `spec` says."""
    q, k, v = drawn(dtype)
    out = causal_attention(q, k, v, AttentionSpec(**{"sm_scale": SCALE, **made}))
    seen = spec.visible(torch.arange(S))
    return output_excess(q[0], out[0], k[seen], v[seen], spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("left", [-1, 0, 30])
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
def test_it_is_silent_where_the_engine_attends_as_metered(
    dtype: torch.dtype, left: int, cap: float, sinks: Tensor | None
) -> None:
    made = {"window_left": left, "logits_soft_cap": cap, "sinks": sinks}
    assert (excess(AttentionSpec(SCALE, cap, left, sinks), made, dtype) <= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("made", "spec"),
    [
        ({"window_left": 29}, AttentionSpec(SCALE, window_left=30)),
        ({"window_left": 31}, AttentionSpec(SCALE, window_left=30)),
        ({}, AttentionSpec(SCALE, window_left=30)),
        ({}, AttentionSpec(SCALE * 1.05)),
        ({"logits_soft_cap": 2.0}, AttentionSpec(SCALE)),
        ({"sinks": SINKS + 8}, AttentionSpec(SCALE)),
        ({}, AttentionSpec(SCALE, sinks=SINKS + 8)),
    ],
    ids=["a token less", "a token more", "no window", "the scale", "no cap", "sinks", "no sinks"],
)
def test_it_says_a_mismatch_where_the_engine_attends_otherwise(
    dtype: torch.dtype, made: dict[str, Any], spec: AttentionSpec
) -> None:
    """True TV of a quantizer that changes nothing is 0 in each of these: the first audit cannot see them."""
    assert (excess(spec, made, dtype) > 0).any()


def test_a_key_of_another_token_and_a_lost_head_are_mismatches() -> None:
    q, k, v = drawn(torch.float32)
    out = causal_attention(q, k, v, AttentionSpec(SCALE))
    other = v.clone()
    other[:, 1] += 0.1
    assert (output_excess(q[0], out[0], k, other, AttentionSpec(SCALE)) > 0).tolist() == [False, False, True, True]
    spoilt = out.clone()
    spoilt[0, 1] = float("nan")
    assert output_excess(q[0], spoilt[0], k, v, AttentionSpec(SCALE)).isinf().tolist() == [False, True, False, False]


def test_rows_whose_reads_are_not_known_or_no_numbers_are_not_compared() -> None:
    q, k, v = drawn(torch.float32)
    v[0, 0] = float("inf")
    out = causal_attention(q, k, v, AttentionSpec(SCALE))
    rows = torch.cat([q, q, q])
    audited, spec = torch.tensor([True, True, False]), AttentionSpec(SCALE)

    def read(places: Tensor) -> tuple[Tensor, Tensor]:
        return k[places], v[places]

    found = compare_rows(rows, [out[0], None, out[0]], [torch.arange(S)] * 3, read, k.__getitem__, audited, spec)
    assert found is not None
    assert found.excess.isnan().tolist() == [[True, True, False, False], [True] * 4, [True] * 4]
    assert found.tv.isnan().tolist() == [[False] * 4, [False] * 4, [True] * 4]
    assert compare_rows(rows, [None] * 3, [], read, k.__getitem__, torch.zeros(3, dtype=torch.bool), spec) is None


def test_a_weight_next_to_one_is_no_variation() -> None:
    """1 - 1e-8 is 1 in float32: what the other tokens weigh must not be counted as moved, or no tight bound holds."""
    q, k = torch.tensor([[1.0]]), torch.zeros(40, 1, 1)
    k[7] = 18.0
    assert float(true_tv(q, k, k, AttentionSpec(1.0))) < 1e-12
