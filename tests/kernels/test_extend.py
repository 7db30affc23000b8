"""Extend over an INT8 prefix and exact new keys, with metered rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from witcert_core.errors import InputError
from witcert_core.kernels.extend import extend_int8

from .compare import assert_outward
from .int8_case import KEY, LAYER, make_case
from .pairwise import name, pairwise
from .test_decode import CLOSE

FACTORS: dict[str, list[Any]] = {
    "prefix": [0, 1, 63, 65, 540],
    "new": [1, 17, 40],
    "page": [1, 16, 64],
    "D": [64, 80, 128],
    "G": [1, 3, 4, 5, 7, 8, 16],
    "dtype": [torch.float32, torch.float16],
    "option": ["plain", "window", "softcap", "sinks"],
    "witness": [False, True],
    "bypass": [0, 1, 4],
}


def check(case: dict[str, Any], backend: str = "auto") -> None:
    spared = {"bypass_pairs": case["bypass"], "dtype": case["dtype"]}
    data = make_case((case["prefix"], 5), case["page"], case["D"], case["G"], **spared)
    g = torch.Generator().manual_seed(4)
    tokens = case["new"] + 2
    q = torch.randn(tokens, case["G"], case["D"], generator=g).to(case["dtype"])
    k_new, v_new = (torch.randn(tokens, 1, case["D"], generator=g).to(case["dtype"]) for _ in range(2))
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "window": {"window_left": 40},
        "softcap": {"logits_soft_cap": 15.0},
        "sinks": {"sinks": torch.randn(case["G"], generator=g)},
    }
    extra = options[case["option"]]
    # A row may be named twice, here with a probability to spend and without.
    rows = torch.tensor([*sorted({0, case["new"] // 2, case["new"] - 1, tokens - 1}), 0], dtype=torch.int32)
    tensors = (
        q,
        k_new,
        v_new,
        data.cache("NHD"),
        data.k_scales,
        data.v_scales,
        torch.tensor([0, case["new"], tokens], dtype=torch.int32),
        data.table,
        data.pass_ids,
    )
    arguments: dict[str, Any] = dict(
        layer=LAYER,
        head_ids=data.head_ids,
        key=KEY,
        max_q_len=case["new"] + 2,
        max_kv_len=max(case["prefix"], 5),
        sm_scale=0.5 / case["D"] ** 0.5,
        meter_rows=rows,
        delta_loc=torch.tensor([1e-7] * (rows.numel() - 1) + [0.0]),
        bypass=data.bypass,
        witness=data.witness if case["witness"] else None,
        **extra,
    )
    out, lse, acc = extend_int8(*tensors, backend=backend, **arguments)
    want_out, want_lse, want_acc = extend_int8(*tensors, backend="reference", **arguments)
    close = CLOSE[case["dtype"]]
    assert (out.double() - want_out.double()).abs().max() <= close * want_out.abs().max().clamp(min=1.0)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-4 if backend == "auto" else 4e-4)
    # Exact tokens have radii of a few 2^-20, to which the rounding of far logits adds visibly, up to 150 * 2^-22.
    assert_outward(acc, want_acc, absolute=4e-5)


@pytest.mark.parametrize("case", pairwise(FACTORS), ids=name)
def test_matches_float64(case: dict[str, Any]) -> None:
    check(case)


def test_chunk_of_another_dtype_is_refused() -> None:
    data = make_case((20,), 16, 64, 1)
    q = torch.zeros(2, 1, 64)
    with pytest.raises(InputError, match="one dtype"):
        extend_int8(
            q,
            q.half(),
            q,
            data.cache("NHD"),
            data.k_scales,
            data.v_scales,
            torch.tensor([0, 2], dtype=torch.int32),
            data.table,
            data.pass_ids,
            layer=LAYER,
            head_ids=data.head_ids,
            key=KEY,
            max_q_len=2,
            max_kv_len=20,
        )


def test_heads_of_512_channels() -> None:
    """The widest that are served."""
    case = {"prefix": 65, "new": 17, "page": 16, "D": 512, "G": 4, "dtype": torch.float16}
    check({**case, "option": "plain", "witness": True, "bypass": 1})
