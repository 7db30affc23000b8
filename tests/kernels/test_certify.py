"""The certificate over foreign quantizers' pools, and the witness written for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from witcert_core.cache.bands import BandMap, band_map
from witcert_core.cache.norm_codes import decode_norm, value_codes, witness_codes
from witcert_core.errors import InputError, UnsupportedError
from witcert_core.kernels.certify import certify
from witcert_core.kernels.witness import record_witness
from witcert_core.meter.bounds import meter
from witcert_core.meter.tv import attention_logits, softmax_with_sink, total_variation
from witcert_core.quantizers.dither import DitherKey, dequantize_int8, dither_vectors, quantize_int8
from witcert_core.quantizers.rotary import RotarySpec

from .compare import assert_outward, engine_meter
from .paged import in_layout, page_table, rows_of
from .pairwise import full, name, pairwise

FACTORS: dict[str, list[Any]] = {
    "S": [1, 63, 64, 65, 1000],
    "page": [1, 16, 64],
    "D": [64, 80, 96, 128, 256],
    "G": [1, 3, 4, 5, 7, 8, 16],
    "dtype": [torch.float32, torch.float16],
    "layout": ["NHD", "HND"],
    "option": ["plain", "window", "softcap", "sinks", "three"],
    "values": [False, True],
}


class Pool:
    """One pool with poisoned unused slots, its witness recorded by the kernel or the reference."""

    def __init__(
        self, length: int, page: int, dim: int, dtype: torch.dtype, bands: BandMap, backend: str = "auto"
    ) -> None:
        g = torch.Generator().manual_seed(3)
        self.table, pages = page_table((length,), page, g)
        shape = (pages, page, 1)
        self.k = torch.full((*shape, dim), float("nan"), dtype=dtype)
        self.v = torch.full((*shape, dim), float("nan"), dtype=dtype)
        self.witness = torch.full((*shape, bands.num_bands), 255, dtype=torch.uint8)
        self.value_witness = torch.full((*shape, 1), 255, dtype=torch.uint8)
        self.slots = self.table.slots(0, length, page)
        self.exact_k = torch.randn(length, 1, dim, generator=g).to(dtype)
        self.exact_v = torch.randn(length, 1, dim, generator=g).to(dtype)
        noise = torch.rand(length, 1, 1, generator=g) * 0.2
        fake_k = self.exact_k.float() + noise * torch.randn(length, 1, dim, generator=g)
        fake_v = self.exact_v.float() + noise * torch.randn(length, 1, dim, generator=g)
        slots = self.slots // page, self.slots % page
        self.k[slots], self.v[slots] = fake_k.to(dtype), fake_v.to(dtype)
        sides = self.witness.flatten(0, 1), self.value_witness.flatten(0, 1)[..., 0]
        exact = self.exact_k, self.exact_v
        record_witness(*exact, self.at(self.k), self.at(self.v), *sides, self.slots, bands, backend=backend)

    def at(self, side: Tensor) -> Tensor:
        page = side.shape[1]
        return side[self.slots // page, self.slots % page]


def options_of(option: str, heads: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(5)
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "window": {"window_left": 40},
        "softcap": {"logits_soft_cap": 15.0},
        "sinks": {"sinks": torch.randn(heads, generator=g)},
        "three": {},
    }
    return options[option]


def check(case: dict[str, Any], backend: str = "auto") -> None:
    bands = band_map(RotarySpec(case["D"]))
    pool = Pool(case["S"], case["page"], case["D"], case["dtype"], bands, backend)
    extra = options_of(case["option"], case["G"])
    q_len = 3 if case["option"] == "three" else 1
    q = torch.randn(q_len, case["G"], case["D"], generator=torch.Generator().manual_seed(9)).to(case["dtype"])
    cache = in_layout(pool.k, pool.v, case["layout"])
    arguments: dict[str, Any] = dict(
        max_kv_len=case["S"],
        sm_scale=0.5 / case["D"] ** 0.5,
        value_witness=pool.value_witness if case["values"] else None,
        **rows_of(case["S"], q_len),
        **extra,
    )
    got = certify(q, cache, pool.witness, pool.table, bands, backend=backend, **arguments)
    want = certify(q, cache, pool.witness, pool.table, bands, backend="reference", **arguments)
    assert_outward(got.acc, want.acc, absolute=2e-6 if case["option"] == "sinks" else 1e-12)
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-5, atol=1e-4)
    assert bool((got.omega >= want.omega).all())
    # The compiled kernel bounds products by lengths, which channels of random size meet by two thirds.
    most = want.omega * (3.0 if backend == "cpu" else 1.02) + 1e-5
    assert bool((got.omega <= most).all())
    for r in range(q_len):
        position = case["S"] - q_len + r
        if position < 0:
            continue
        first = max(position - 40, 0) if case["option"] == "window" else 0
        seen = slice(first, position + 1)
        weights = []
        for keys in (pool.exact_k, pool.at(pool.k)):
            z = attention_logits(
                q[r].double(), keys[seen].double(), 0.5 / case["D"] ** 0.5, extra.get("logits_soft_cap", 0.0)
            )
            weights.append(softmax_with_sink(z, extra.get("sinks")))
        assert bool((engine_meter(got)[r] >= total_variation(*weights)).all())


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
            "values": True,
        }
    )


GRID = full({key: FACTORS[key] for key in ("S", "page", "D", "G", "dtype")})


@pytest.mark.full_grid
@pytest.mark.parametrize("index", range(len(GRID)), ids=lambda i: name(GRID[i]))
def test_matches_float64_everywhere(index: int) -> None:
    turns = {key: FACTORS[key][index % len(FACTORS[key])] for key in ("layout", "values")}
    check({**GRID[index], **turns, "option": FACTORS["option"][index // 2 % 5]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [64, 80])
def test_witness_kernel_is_never_below_the_residual_and_at_most_one_code_above(dtype: torch.dtype, dim: int) -> None:
    bands = band_map(RotarySpec(dim))
    kernel, plain = (Pool(37, 16, dim, dtype, bands, backend) for backend in ("auto", "reference"))
    for got, want in ((kernel.witness, plain.witness), (kernel.value_witness, plain.value_witness)):
        step = got.int() - want.int()
        assert int(step.min()) >= 0
        assert int(step.max()) <= 1
    residual = kernel.at(kernel.k).double() - kernel.exact_k.double()
    assert bool((decode_norm(kernel.at(kernel.witness)) >= bands.norms(residual)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_witness_is_recorded_of_views_and_skips_padding(dtype: torch.dtype) -> None:
    """Of views into a fused projection, and with slots that are skipped; the others keep what they say."""
    bands = band_map(RotarySpec(64))
    pool = Pool(37, 16, 64, dtype, bands, "auto")
    stored_k, stored_v = pool.at(pool.k), pool.at(pool.v)
    fused = torch.cat([pool.exact_k, pool.exact_v], -1)
    exact_k, exact_v = fused[..., :64], fused[..., 64:]
    assert not exact_k.is_contiguous()
    slots = pool.slots.clone()
    slots[5] = -1
    for backend, below in (("auto", 0), ("reference", 1)):
        witness, values = (torch.full(x.flatten(0, 1).shape, 77, dtype=torch.uint8) for x in (pool.witness, pool.k))
        values = values[..., 0].contiguous()
        record_witness(exact_k, exact_v, stored_k, stored_v, witness, values, slots, bands, backend=backend)
        skipped = pool.slots[5]
        assert (witness[skipped] == 77).all()
        assert (values[skipped] == 77).all()
        kept = slots[slots >= 0]
        for got, want in ((witness, pool.witness), (values, pool.value_witness)):
            gap = want.flatten(0, 1).reshape(got.shape)[kept].int() - got[kept].int()
            assert int(gap.min()) >= 0
            assert int(gap.max()) <= below
    with pytest.raises(InputError, match="stored_v"):
        record_witness(exact_k, exact_v, stored_k, stored_v[:-1], witness, values, slots, bands)
    with pytest.raises(InputError, match="value_witness"):
        record_witness(exact_k, exact_v, stored_k, stored_v, witness, values[:-1], slots, bands)
    with pytest.raises(InputError, match="32 bit"):
        record_witness(exact_k.double(), exact_v, stored_k.double(), stored_v, witness, values, slots, bands)


def test_witness_of_extreme_residuals() -> None:
    bands = BandMap(torch.arange(32) // 8, 4)
    exact = torch.zeros(1, 1, 32)
    fake = torch.zeros(1, 1, 32)
    fake[0, 0, 8], fake[0, 0, 16], fake[0, 0, 24] = 1e-30, 1e30, float("nan")
    witness, values = torch.zeros(1, 1, 4, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8)
    record_witness(exact, exact, fake, exact, witness, values, torch.zeros(1, dtype=torch.int64), bands)
    assert witness.flatten().tolist() == [0, 1, 255, 255]
    assert values.flatten().tolist() == [0]


def test_unknown_slot_makes_the_meter_one_and_rows_may_come_in_any_order() -> None:
    bands = band_map(RotarySpec(64))
    pool = Pool(70, 16, 64, torch.float32, bands)
    page, offset = int(pool.slots[50]) // 16, int(pool.slots[50]) % 16
    pool.witness[page, offset, 0, 7] = 255
    q = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(2))
    rows: dict[str, Any] = dict(
        row_request=torch.zeros(3, dtype=torch.int32),
        row_position=torch.tensor([69, 49, 50], dtype=torch.int32),
    )
    got = certify(
        q,
        (pool.k, pool.v),
        pool.witness,
        pool.table,
        bands,
        max_kv_len=70,
        **rows,
    )
    want = certify(q, (pool.k, pool.v), pool.witness, pool.table, bands, max_kv_len=70, backend="reference", **rows)
    assert engine_meter(got)[0].tolist() == [1.0, 1.0] == engine_meter(got)[2].tolist()
    assert bool((engine_meter(got)[1] < 1.0).all())
    assert_outward(got.acc[1:2], want.acc[1:2])


@pytest.mark.parametrize("narrow", [torch.float8_e5m2, torch.float8_e4m3fn], ids=["e5m2", "e4m3"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_fp8_pool_is_certified_through_the_page_table(narrow: torch.dtype, layout: str) -> None:
    bands = band_map(RotarySpec(80))
    pool = Pool(70, 16, 80, torch.float16, bands)
    k, v = (torch.full(x.shape, float("nan")).to(narrow) for x in (pool.k, pool.v))
    page, offset = pool.slots // 16, pool.slots % 16
    k[page, offset] = pool.exact_k.to(narrow)
    v[page, offset] = pool.exact_v.to(narrow)
    pool.witness[page, offset] = witness_codes(pool.exact_k.float(), k[page, offset].float(), bands)
    values = value_codes(pool.exact_v.float(), v[page, offset].float())
    pool.value_witness[page, offset] = values[..., None]
    q = torch.randn(1, 5, 80, generator=torch.Generator().manual_seed(2)).half()
    arguments: dict[str, Any] = dict(max_kv_len=70, value_witness=pool.value_witness, **rows_of(70))
    cache = in_layout(k, v, layout)
    got = certify(q, cache, pool.witness, pool.table, bands, **arguments)
    want = certify(q, cache, pool.witness, pool.table, bands, backend="reference", **arguments)
    assert_outward(got.acc, want.acc)
    assert bool((meter(got.acc)[0] <= engine_meter(got)).all())
    weights = [
        softmax_with_sink(attention_logits(q[0].double(), keys.double(), 80**-0.5, 0.0), None)
        for keys in (pool.exact_k, k[page, offset].float())
    ]
    assert bool((engine_meter(got)[0] >= total_variation(*weights)).all())
    assert bool((engine_meter(got)[0] < 1.0).all())


def test_refusal_of_keys_that_would_round() -> None:
    bands = band_map(RotarySpec(64))
    pool = Pool(40, 16, 64, torch.float16, bands)
    q = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(2)).half()
    with pytest.raises(UnsupportedError, match="would round keys"):
        certify(q, (pool.k.float(), pool.v.float()), pool.witness, pool.table, bands, max_kv_len=40, **rows_of(40))


@pytest.mark.parametrize("delta", [0.0, 1e-7])
@pytest.mark.parametrize("dim", [80, 128])
def test_dithered_keys_get_the_probabilistic_radius_and_the_rounding_of_the_pool(dim: int, delta: float) -> None:
    bands = band_map(RotarySpec(dim))
    pool = Pool(70, 16, dim, torch.float16, bands)
    u = dither_vectors(DitherKey(3, 4), torch.full((70,), 9), 0, [0], dim)
    codes, scales = quantize_int8(pool.exact_k.float(), u)
    fake = dequantize_int8(codes, scales, u)
    steps = torch.full((*pool.k.shape[:3], scales.shape[-1]), float("nan"), dtype=torch.float16)
    page, offset = pool.slots // 16, pool.slots % 16
    steps[page, offset] = scales
    pool.k[page, offset] = fake.half()
    pool.witness[page, offset] = witness_codes(fake, fake.half().float(), bands)
    q = torch.randn(1, 5, dim, generator=torch.Generator().manual_seed(2)).half()
    arguments: dict[str, Any] = dict(max_kv_len=70, steps=steps, delta_loc=torch.full((1,), delta), **rows_of(70))
    got = certify(q, (pool.k, pool.v), pool.witness, pool.table, bands, **arguments)
    want = certify(q, (pool.k, pool.v), pool.witness, pool.table, bands, backend="reference", **arguments)
    assert_outward(got.acc, want.acc)
    weights = [
        softmax_with_sink(attention_logits(q[0].double(), keys.double(), dim**-0.5, 0.0), None)
        for keys in (pool.exact_k, pool.at(pool.k))
    ]
    assert bool((engine_meter(got)[0] >= total_variation(*weights)).all())
    assert bool((engine_meter(got)[0] < 0.5).all())
    steps[page[3], offset[3], 0, 1] = float("inf")
    unknown = certify(q, (pool.k, pool.v), pool.witness, pool.table, bands, **arguments)
    assert engine_meter(unknown).tolist() == [[1.0] * 5]
    with pytest.raises(InputError, match="delta_loc without steps"):
        certify(q, (pool.k, pool.v), pool.witness, pool.table, bands, **(arguments | {"steps": None}))
