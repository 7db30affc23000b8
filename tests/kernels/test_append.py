"""The INT8 writer: code for code what the reference stores, and sound where they may differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from witcert_core.cache.outliers import taken, without
from witcert_core.errors import InputError
from witcert_core.kernels.append import append_int8
from witcert_core.kernels.host.bypass import BypassedKeys
from witcert_core.quantizers.dither import HALF_STEP_MARGIN, DitherKey, decode_group_witness, dither_vectors, num_groups

from .paged import in_layout, page_table, some_channels
from .pairwise import name, pairwise

KEY = DitherKey(3, 4)
FACTORS: dict[str, list[Any]] = {
    "T": [1, 31, 33, 65],
    "page": [1, 16, 64],
    "D": [64, 80, 96, 128, 256],
    "heads": [1, 3],
    "dtype": [torch.float32, torch.float16],
    "layout": ["NHD", "HND", "5D"],
    "witness": [False, True],
    "bypass": [0, 1, 4],
}
SMALL: dict[str, Any] = {
    "page": 16,
    "D": 64,
    "heads": 1,
    "dtype": torch.float32,
    "layout": "NHD",
    "bypass": 0,
}


class Pool:
    """Poisoned pool and the tokens to write into it."""

    def __init__(self, case: dict[str, Any]) -> None:
        g = torch.Generator().manual_seed(6)
        self.page, heads, dim = case["page"], case["heads"], case["D"]
        self.table, pages = page_table((case["T"],), self.page, g)
        shape = (pages, self.page, heads)
        self.k = torch.full((*shape, dim), 99, dtype=torch.int8)
        self.v = torch.full((*shape, dim), 99, dtype=torch.int8)
        groups = num_groups(dim)
        self.k_scales = torch.full((*shape, groups), float("nan"), dtype=torch.float16)
        self.v_scales = self.k_scales.clone()
        self.witness = torch.full((*shape, groups), 77, dtype=torch.uint8) if case["witness"] else None
        self.pass_ids = torch.randint(-(2**31), 2**31, (pages * self.page,), generator=g).to(torch.int32)
        magnitude = torch.randn(case["T"], heads, 1, generator=g).mul(3).exp()
        self.key = (torch.randn(case["T"], heads, dim, generator=g) * magnitude).to(case["dtype"])
        self.value = torch.randn(case["T"], heads, dim, generator=g).to(case["dtype"])
        self.bypass = None
        if case["bypass"]:
            channels = some_channels(dim, heads, case["bypass"], g)
            self.bypass = BypassedKeys.allocate(channels, dim, pages, self.page, case["dtype"], self.key.device)
            self.key = torch.where(self.bypass.keep.bool(), self.key, self.key * 8.0)
            self.bypass.k.fill_(7.0)
        self.slots = self.table.slots(0, case["T"], self.page)

    def write(self, case: dict[str, Any], backend: str) -> None:
        self.k, self.v = in_layout(self.k, self.v, case["layout"])
        append_int8(
            self.key,
            self.value,
            (self.k, self.v),
            self.k_scales,
            self.v_scales,
            self.pass_ids,
            layer=2,
            head_ids=torch.arange(case["heads"], dtype=torch.int32) + 9,
            dither_key=KEY,
            slot_mapping=self.slots,
            witness=self.witness,
            bypass=self.bypass,
            backend=backend,
        )

    def at(self, side: Tensor) -> Tensor:
        return side[self.slots // self.page, self.slots % self.page]


def same(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.float().nan_to_num(nan=-7.0), want.float().nan_to_num(nan=-7.0))


def check(case: dict[str, Any], backend: str = "auto") -> None:
    kernel, plain = Pool(case), Pool(case)
    kernel.write(case, backend)
    plain.write(case, "reference")
    for side in ("k_scales", "v_scales"):
        assert same(getattr(kernel, side), getattr(plain, side)), side
    for side in ("k", "v"):
        # float32 may round a number half way between two codes to the other one than float64 does.
        step = (getattr(kernel, side).int() - getattr(plain, side).int()).abs()
        assert int(step.max()) <= (0 if backend == "cpu" else 1), side
        assert int(step.sum()) <= 1 + step.numel() // 10000, side
    s = kernel.at(kernel.k_scales).double()
    coded = kernel.key.double()
    if kernel.bypass is not None and plain.bypass is not None:
        assert torch.equal(kernel.bypass.k, plain.bypass.k)
        index = kernel.bypass.index
        assert torch.equal(kernel.at(kernel.bypass.k), taken(kernel.key, index))
        assert not bool(taken(kernel.at(kernel.k), index).any())
        coded = without(coded, index)
    amax = torch.nn.functional.pad(coded.abs(), (0, -case["D"] % 32)).unflatten(-1, (-1, 32)).amax(-1)
    assert bool((s * 127 >= amax).all())
    ids = kernel.pass_ids[kernel.slots].long() & 0xFFFFFFFF
    u = dither_vectors(KEY, ids, 2, [9 + h for h in range(case["heads"])], case["D"]).double()
    spread = s.repeat_interleave(32, dim=-1)[..., : case["D"]]
    if kernel.bypass is not None:
        u = without(u, kernel.bypass.index)
    residual = spread * (kernel.at(kernel.k).double() - u) - coded
    assert bool((residual.abs() <= spread / 2 * HALF_STEP_MARGIN).all())
    if kernel.witness is not None and plain.witness is not None:
        step = kernel.witness.int() - plain.witness.int()
        assert int(step.abs().max()) <= 1
        grouped = torch.nn.functional.pad(residual, (0, -case["D"] % 32)).unflatten(-1, (-1, 32)).norm(dim=-1)
        known = decode_group_witness(kernel.at(kernel.witness), kernel.at(kernel.k_scales))
        assert bool((known >= grouped).all())


@pytest.mark.parametrize("case", pairwise(FACTORS), ids=name)
def test_stores_what_the_reference_stores_and_nothing_else(case: dict[str, Any]) -> None:
    check(case)


def test_spoilt_groups_read_back_as_infinite_and_padding_is_skipped() -> None:
    case = {**SMALL, "T": 5}
    pool = Pool({**case, "witness": True})
    pool.key[0, 0, 3], pool.key[1, 0, 40], pool.value[2, 0, 0] = float("nan"), float("-inf"), float("nan")
    pool.key[3, 0, 32:], pool.key[3, 0, :32] = 0.0, 1e-9
    skipped = int(pool.slots[4])
    pool.slots[4] = -1
    pool.write(case, "auto")
    inf = float("inf")
    scales = pool.k_scales.reshape(-1, 2)
    assert scales[pool.slots[0]][0] == inf == scales[pool.slots[1]][1]
    assert pool.v_scales.reshape(-1, 2)[pool.slots[2]][0] == inf
    assert scales[pool.slots[3]].tolist() == [2.0**-24, 0.0]
    assert bool(scales[skipped].isnan().all())
    assert bool(pool.k.reshape(-1, 64)[skipped].eq(99).all())


def test_bad_shapes_are_named() -> None:
    pool = Pool({**SMALL, "T": 5, "witness": False})
    pool.key = pool.key[..., :32]
    with pytest.raises(InputError, match=r"must be \[T, 1, 64\]"):
        pool.write(SMALL, "auto")


def test_heads_of_512_channels() -> None:
    """The widest that are served."""
    check({**SMALL, "T": 33, "D": 512, "witness": True})
