"""What vLLM's own CPU kernel does with weights and outputs is what is claimed of it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from vllm import _custom_ops as ops
from witcert_vllm.runtime import cpu_arithmetic

from witcert_core.meter.kernel_error import UNIT

D, S, BLOCK = 64, 320, 32
PLAIN = SimpleNamespace(kv_cache_dtype="auto")


def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The kernel's output [D] for a query that reads the first channel of k [S, 1, D]."""
    dtype = k.dtype
    q = torch.zeros(1, 1, D, dtype=dtype)
    q[..., 0] = 1.0
    cache = torch.zeros(S // BLOCK + 1, 1, 2 * BLOCK, D, dtype=dtype)
    keys, values = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(k, v, keys, values, torch.arange(S), "vec")
    starts, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([S], dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=D,
        seq_lens=lengths,
        dtype=dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa="vec",
        enable_kv_split=False,
    )
    out = torch.zeros(1, 1, D, dtype=dtype)
    table = torch.arange(S // BLOCK, dtype=torch.int32)[None]
    ops.cpu_attention_with_kv_cache(q, keys, values, out, starts, lengths, 1.0, True, None, -1, table, 0.0, plan, None)
    return out[0, 0].double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_stay_in_float32_and_outputs_round_as_claimed(dtype: torch.dtype) -> None:
    unit, claimed = UNIT[dtype], cpu_arithmetic(dtype, PLAIN)
    assert claimed.weights == ()
    k = torch.zeros(S, 1, D, dtype=dtype)
    k[1:, 0, 0] = math.log(0.5 * (1 + 1.8 * unit))  # cut to 16 bit all but one would lose most of a unit
    v = torch.full((S, 1, D), 1.0, dtype=dtype)
    assert (attend(k, v) - 1.0).abs().max() < 0.1 * unit
    k[1:, 0, 0] = 0.0
    v[: int(0.9 * S)] = 1.0 + 2 * unit  # the mean lies at nine tenths of a step
    exact = v[:, 0, 0].double().mean()
    assert ((attend(k, v) - exact).abs() <= claimed.output_unit * exact).all()


def test_an_8_bit_cache_and_truncated_outputs_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_arithmetic(torch.bfloat16, SimpleNamespace(kv_cache_dtype="fp8")).weights == (torch.bfloat16,)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert cpu_arithmetic(torch.bfloat16, PLAIN).output_unit == 2.0**-7
    assert cpu_arithmetic(torch.float16, PLAIN).output_unit == 2.0**-11
