"""The INT8 decode kernel against float64, on odd shapes with everything unused poisoned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from witcert_core.errors import InputError, UnsupportedError
from witcert_core.kernels.decode import Workspace, decode_int8
from witcert_core.meter.bounds import meter
from witcert_core.meter.sums import AccField

from .compare import assert_outward
from .int8_case import KEY, LAYER, make_case, queries
from .pairwise import full, name, pairwise

FACTORS: dict[str, list[Any]] = {
    "S": [1, 63, 64, 65, 1000],
    "page": [1, 16, 64],
    "D": [64, 80, 96, 128, 256],
    "G": [1, 3, 4, 5, 7, 8, 16],
    "dtype": [torch.float32, torch.float16],
    "layout": ["NHD", "HND", "5D"],
    "option": ["plain", "window", "softcap", "sinks", "three"],
    "witness": [False, True],
    "rows": ["shared", "mixed"],
    "delta": [0.0, 1e-7],
    "bypass": [0, 1, 4],
}

CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 1.6e-2}


def options_of(option: str, heads: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(5)
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "window": {"window_left": 40},
        "softcap": {"logits_soft_cap": 15.0},
        "sinks": {"sinks": torch.randn(heads, generator=g)},
        "three": {"q_len": 3},
    }
    return options[option]


def check(case: dict[str, Any], backend: str = "auto") -> None:
    spared = {"bypass_pairs": case["bypass"], "dtype": case["dtype"]}
    data = make_case((case["S"],), case["page"], case["D"], case["G"], mixed=case["rows"] == "mixed", **spared)
    extra = options_of(case["option"], case["G"])
    q_len = extra.get("q_len", 1)
    q = queries(data, q_len, case["dtype"])
    arguments: dict[str, Any] = dict(
        layer=LAYER,
        head_ids=data.head_ids,
        key=KEY,
        max_kv_len=max(data.lengths),
        sm_scale=0.5 / case["D"] ** 0.5,
        bypass=data.bypass,
        witness=data.witness if case["witness"] else None,
        delta_loc=torch.full((q.shape[0],), case["delta"]),
        **extra,
    )
    tensors = (q, data.cache(case["layout"]), data.k_scales, data.v_scales, data.table, data.pass_ids)
    out, lse, acc = decode_int8(*tensors, backend=backend, **arguments)
    want_out, want_lse, want_acc = decode_int8(*tensors, backend="reference", **arguments)
    close = CLOSE[case["dtype"]]
    scale = want_out.abs().max().clamp(min=1.0)
    assert (out.double() - want_out.double()).abs().max() <= close * scale
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-4 if backend == "auto" else 4e-4)
    assert_outward(acc, want_acc, absolute=2e-6 if case["option"] == "sinks" else 1e-12)
    tv = data.truth(q, q_len, 0.5 / case["D"] ** 0.5, **{k: v for k, v in extra.items() if k != "q_len"})
    assert bool((meter(acc)[0] >= tv).all())


@pytest.mark.parametrize("case", pairwise(FACTORS), ids=name)
def test_matches_float64(case: dict[str, Any]) -> None:
    check(case)


def test_heads_of_512_channels() -> None:
    """The widest that are served."""
    check(
        {
            "S": 65,
            "page": 16,
            "D": 512,
            "G": 4,
            "dtype": torch.float16,
            "layout": "HND",
            "option": "three",
            "witness": True,
            "rows": "mixed",
            "delta": 1e-7,
            "bypass": 1,
        }
    )


GRID = full({key: FACTORS[key] for key in ("S", "page", "D", "G", "dtype")})


@pytest.mark.full_grid
@pytest.mark.parametrize("index", range(len(GRID)), ids=lambda i: name(GRID[i]))
def test_matches_float64_everywhere(index: int) -> None:
    """Every shape; options, layouts and rows take turns, at steps that have no common factor."""
    turns = {key: FACTORS[key][index % len(FACTORS[key])] for key in ("layout", "witness", "delta", "bypass")}
    turns |= {"option": FACTORS["option"][index // 2 % 5], "rows": FACTORS["rows"][index // 7 % 2]}
    check({**GRID[index], **turns})


def test_alone_equals_in_a_batch_bitwise_and_metered_equals_unmetered() -> None:
    data = make_case((65, 600, 1, 0), 16, 64, 4, kv_heads=2)
    q = queries(data, 1, torch.float32)
    common: dict[str, Any] = dict(layer=LAYER, head_ids=data.head_ids, key=KEY, witness=data.witness)
    pool = (data.cache("NHD"), data.k_scales, data.v_scales)
    together = decode_int8(q, *pool, data.table, data.pass_ids, max_kv_len=2000, **common)
    plain = decode_int8(q, *pool, data.table, data.pass_ids, max_kv_len=600, meter=False, **common)
    assert torch.equal(together[0], plain[0])
    assert torch.equal(together[1], plain[1])
    for r, length in enumerate(data.lengths):
        alone = decode_int8(q[r : r + 1], *pool, data.only(r), data.pass_ids, max_kv_len=max(length, 1), **common)
        for batch, single in zip(together, alone, strict=True):
            assert torch.equal(batch[r], single[0])
    assert bool(together[0][3].eq(0).all())
    assert bool(together[1][3].eq(float("-inf")).all())
    assert bool(together[2][3].isinf().all())


@pytest.mark.parametrize("spoil", ["k_scale_nan", "k_scale_inf", "row_never", "q_nan", "q_inf", "v_scale_nan"])
def test_the_unknown_is_reported_as_unknown(spoil: str) -> None:
    data = make_case((70,), 16, 64, 1)
    q = queries(data, 1, torch.float32)
    slot = int(data.table.slots(0, 70, 16)[33])
    if spoil == "row_never":
        data.pass_ids[slot] = 0
    elif spoil.startswith("q_"):
        q[0, 0, 5] = float(spoil[2:])
    else:
        side = data.k_scales if spoil.startswith("k") else data.v_scales
        side[slot // 16, slot % 16, 0, 1] = float(spoil.split("_")[-1])
    acc = decode_int8(
        q,
        data.cache("NHD"),
        data.k_scales,
        data.v_scales,
        data.table,
        data.pass_ids,
        layer=LAYER,
        head_ids=data.head_ids,
        key=KEY,
        max_kv_len=70,
        witness=data.witness,
    )[2]
    assert not bool(acc.isnan().any())
    if spoil == "v_scale_nan":
        assert float(meter(acc)[0]) < 1.0
    else:
        assert float(meter(acc)[0]) == 1.0
    if not spoil.startswith("k_"):
        assert acc[0, 0, AccField.RHO_MAX] == float("inf")


def test_counter_and_flag_tell_measured_from_replayed() -> None:
    data = make_case((20, 0), 16, 64, 2)
    q = queries(data, 1, torch.float32)
    counters, flag = torch.zeros(8, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    acc = torch.full((2, 2, 16), 5.0)

    def step() -> torch.Tensor:
        return decode_int8(
            q,
            data.cache("NHD"),
            data.k_scales,
            data.v_scales,
            data.table,
            data.pass_ids,
            layer=LAYER,
            head_ids=data.head_ids,
            key=KEY,
            max_kv_len=20,
            counters=counters,
            flag=flag,
            acc=acc,
        )[0]

    without = step()
    assert counters.sum() == 0
    assert bool((acc == 5.0).all())
    flag.fill_(1)
    assert torch.equal(step(), without)
    assert counters.tolist() == [0, 0, 0, 2, 0, 0, 0, 0]
    assert bool((acc[0] != 5.0).all())


def test_refusals_name_what_is_wrong() -> None:
    data = make_case((20,), 16, 64, 2)
    q = queries(data, 1, torch.float32)
    pool = (data.cache("NHD"), data.k_scales, data.v_scales, data.table, data.pass_ids)
    common: dict[str, Any] = dict(layer=LAYER, head_ids=data.head_ids, key=KEY)
    with pytest.raises(InputError, match=r"max_kv_len is 600000"):
        decode_int8(q, *pool, max_kv_len=600000, **common)
    small = Workspace.allocate(1, 2, 64, 100, q.device)
    with pytest.raises(InputError, match="workspace"):
        decode_int8(q, *pool, max_kv_len=600, workspace=small, **common)
    with pytest.raises(InputError, match="agree but for the channels"):
        decode_int8(q, (data.k, data.v.permute(0, 2, 1, 3)), *pool[1:], max_kv_len=20, **common)
    with pytest.raises(InputError, match=r"codes are torch\.int8"):
        decode_int8(q, (data.k.float(), data.v.float()), *pool[1:], max_kv_len=20, **common)
    with pytest.raises(UnsupportedError, match="bfloat16"):
        decode_int8(q.to(torch.bfloat16), *pool, max_kv_len=20, **common)
