"""Mixed pages: exact ones from the side pool, packed ones beside them, one kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from witcert_core.errors import InputError
from witcert_core.kernels.decode import decode_int8
from witcert_core.kernels.repair import RepairedPages, repair_pages
from witcert_core.meter.bounds import meter

from .compare import assert_outward
from .int8_case import KEY, LAYER, make_case, queries


def repair(data: Any, page: int, head: int, entry: int, side: RepairedPages, backend: str = "auto") -> None:
    ids = [torch.tensor([x], dtype=torch.int32) for x in (page, head, entry)]
    exact = [x[page, :, head][None].to(side.k.dtype).contiguous() for x in (data.exact_k, data.exact_v)]
    repair_pages(side, *ids, *exact, backend=backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("page_size", "dim"), [(16, 64), (64, 80), (1, 128)])
def test_mixed_pages_match_float64(page_size: int, dim: int, dtype: torch.dtype) -> None:
    data = make_case((90,), page_size, dim, 3, kv_heads=2)
    q = queries(data, 1, dtype)
    used = data.table.indices.tolist()
    side = RepairedPages.allocate(data.k.shape[0], 2, 5, page_size, dim, dim, dtype, q.device)
    for entry, (page, head) in enumerate(((used[0], 1), (used[-1], 0), (used[1], 0), (used[1], 1))):
        repair(data, page, head, 4 - entry, side)
        # What the packed form said of a repaired page must not matter any more.
        data.k_scales[page, :, head] = float("nan")
        data.v_scales[page, :, head] = float("nan")
        data.witness[page, :, head] = 255
    arguments: dict[str, Any] = dict(
        layer=LAYER, head_ids=data.head_ids, key=KEY, max_kv_len=90, witness=data.witness, repaired=side
    )
    pool = (data.cache("NHD"), data.k_scales, data.v_scales, data.table, data.pass_ids)
    out, lse, acc = decode_int8(q, *pool, **arguments)
    want_out, want_lse, want_acc = decode_int8(q, *pool, backend="reference", **arguments)
    close = 2e-5 if dtype == torch.float32 else 4e-3
    assert (out.double() - want_out.double()).abs().max() <= close * want_out.abs().max()
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-4)
    assert_outward(acc, want_acc, absolute=1e-5)


def test_repairing_everything_leaves_only_the_arithmetic() -> None:
    data = make_case((40,), 16, 64, 2)
    q = queries(data, 1, torch.float32)
    side = RepairedPages.allocate(data.k.shape[0], 1, 4, 16, 64, 64, torch.float32, q.device)
    pool = (data.cache("NHD"), data.k_scales, data.v_scales, data.table, data.pass_ids)
    arguments: dict[str, Any] = dict(layer=LAYER, head_ids=data.head_ids, key=KEY, max_kv_len=40)
    before = float(meter(decode_int8(q, *pool, **arguments)[2])[0].max())
    for entry, page in enumerate(data.table.indices.tolist()):
        repair(data, page, 0, entry, side)
    after = float(meter(decode_int8(q, *pool, repaired=side, **arguments)[2])[0].max())
    assert before > 1e-2
    assert after < 1e-3


def test_scatter_equals_the_reference_and_refuses_what_does_not_fit() -> None:
    data = make_case((40,), 16, 64, 2)
    sides = [RepairedPages.allocate(5, 1, 3, 16, 64, 64, torch.float16, data.k.device) for _ in range(2)]
    for side, backend in zip(sides, ("auto", "reference"), strict=True):
        repair(data, 2, 0, 1, side, backend)
        repair(data, -1, 0, 2, side, backend)
    for got, want in zip(vars(sides[0]).values(), vars(sides[1]).values(), strict=True):
        assert torch.equal(got, want)
    assert sides[0].index.flatten().tolist() == [-1, -1, 1, -1, -1]
    ids = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(InputError, match="exact_k is"):
        repair_pages(sides[0], ids, ids, ids, torch.zeros(1, 8, 64), torch.zeros(1, 16, 64))
    q = queries(data, 1, torch.float16)
    with pytest.raises(InputError, match="must be 1 beside repaired pages"):
        decode_int8(
            q,
            data.cache("NHD"),
            data.k_scales,
            data.v_scales,
            data.table,
            data.pass_ids,
            layer=LAYER,
            head_ids=data.head_ids,
            key=KEY,
            max_kv_len=40,
            k_scale=2.0,
            repaired=sides[0],
        )
