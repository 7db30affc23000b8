"""The compiled kernels for CPUs: the cases of the Triton ones, and bfloat16; the same bits alone and in any batch."""

from __future__ import annotations

import math
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.cpu.audit import audited
from witcert_core.cache.bands import band_map
from witcert_core.errors import UnsupportedError
from witcert_core.kernels.certify import Certificate, certify
from witcert_core.kernels.decode import decode_int8
from witcert_core.kernels.extend import extend_int8
from witcert_core.kernels.native import build
from witcert_core.meter.bounds import meter
from witcert_core.meter.sums import AccField
from witcert_core.meter.tv import attention_logits
from witcert_core.quantizers.rotary import RotarySpec

from . import test_append, test_certify, test_decode, test_extend
from .int8_case import KEY, LAYER, make_case, queries
from .paged import page_table, rows_of
from .pairwise import name, pairwise

OPERATIONS = {"append": test_append, "decode": test_decode, "extend": test_extend, "certify": test_certify}
CASES = [
    pytest.param(module.check, case, id=f"{operation}-{name(case)}")
    for operation, module in OPERATIONS.items()
    for case in pairwise({**module.FACTORS, "dtype": [torch.float32, torch.float16, torch.bfloat16]})
]


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``auto`` takes, and so the arithmetic that the reference allows for."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.mark.parametrize(("check", "case"), CASES)
def test_matches_float64(check: Callable[[dict[str, Any], str], None], case: dict[str, Any]) -> None:
    check(case, "cpu")


LESS = ("skylake-avx512", "x86-64-v3", "x86-64-v2")
"""AVX-512 without dot products of bytes, AVX2, and SSE4: vectors of 16, 8 and 4 lanes."""


@pytest.mark.parametrize("arch", LESS)
@pytest.mark.parametrize(("check", "case"), CASES[::5])
@pytest.mark.skipif(platform.machine() != "x86_64", reason="of one family of processors")
def test_less_of_a_processor_serves_too(
    check: Callable[[dict[str, Any], str], None], case: dict[str, Any], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors are narrower and steps go another way without the instructions that the machine at hand has."""
    built = build.compiled
    for operation in OPERATIONS:
        monkeypatch.setattr(f"witcert_core.kernels.{operation}.cpu.compiled", lambda op: built(op, arch))
    check(case, "cpu")


def test_no_bound_is_below_the_truth_of_a_hostile_cache() -> None:
    """A corner of ``python -m bench.cpu.audit``; call 78 has a sink that takes all weight from a token it lost."""
    found = audited(5000, seed=60)
    assert (found.violations, found.seeds) == (0, ())
    assert found.bounded > found.cells // 2
    assert 0.9 < found.tightest <= 1.0


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_alone_equals_in_a_batch_bitwise_and_metered_equals_unmetered(threads: int) -> None:
    data = make_case((65, 1100, 1, 0), 16, 64, 4, kv_heads=2)
    q = queries(data, 1, torch.bfloat16)
    common: dict[str, Any] = dict(
        layer=LAYER, head_ids=data.head_ids, key=KEY, witness=data.witness, max_kv_len=1100, backend="cpu"
    )
    pool = (data.cache("NHD"), data.k_scales, data.v_scales)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = decode_int8(q, *pool, data.table, data.pass_ids, **common)
        plain = decode_int8(q, *pool, data.table, data.pass_ids, meter=False, **common)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together[0], plain[0])
    assert torch.equal(together[1], plain[1])
    for r in range(len(data.lengths)):
        alone = decode_int8(q[r : r + 1], *pool, data.only(r), data.pass_ids, **common)
        for batch, single in zip(together, alone, strict=True):
            assert torch.equal(batch[r], single[0])
    assert bool(together[0][3].eq(0).all())
    assert bool(together[1][3].eq(float("-inf")).all())
    assert bool(together[2][3].isinf().all())


def test_a_chunk_in_one_call_is_the_chunk_row_by_row() -> None:
    """Rows share tiles; what a row gets does not depend on its neighbours."""
    data = make_case((70,), 16, 64, 4)
    g = torch.Generator().manual_seed(8)
    q = torch.randn(40, 4, 64, generator=g).bfloat16()
    k, v = (torch.randn(40, 1, 64, generator=g).bfloat16() for _ in range(2))
    common: dict[str, Any] = dict(
        layer=LAYER, head_ids=data.head_ids, key=KEY, max_q_len=40, max_kv_len=70, backend="cpu"
    )
    side = (data.cache("NHD"), data.k_scales, data.v_scales)

    def run(rows: int) -> tuple[torch.Tensor, ...]:
        indptr, metered = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([rows - 1], dtype=torch.int32)
        given = (q[:rows], k[:rows], v[:rows], *side, indptr, data.table, data.pass_ids)
        return extend_int8(*given, meter_rows=metered, **common)

    out, lse, acc = run(40)
    for rows in (1, 17, 33, 40):
        some = run(rows)
        assert torch.equal(some[0], out[:rows])
        assert torch.equal(some[1], lse[:rows])
    assert torch.equal(run(40)[2], acc)


@pytest.mark.parametrize("arch", ["native", *(LESS if platform.machine() == "x86_64" else ())])
@pytest.mark.parametrize("operation", [*OPERATIONS, "witness"])
def test_compiles_without_a_warning(operation: str, arch: str) -> None:
    source = Path(build.__file__).parents[1] / operation / "cpu.cpp"
    flags = ("-std=c++17", "-fopenmp", "-Wno-psabi", "-Wall", "-Wextra", "-Werror", "-fsyntax-only")
    subprocess.run(["c++", *flags, f"-march={arch}", str(source)], check=True)


def test_without_a_compiler_the_reason_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(UnsupportedError, match="there is no compiler '/nowhere/c\\+\\+'; install g"):
        build.compiled.__wrapped__("append")


def test_a_compiler_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "c++ -DWITCERT_NO -include /nowhere.h")
    with pytest.raises(UnsupportedError, match="not compiled: ") as told:
        build.compiled.__wrapped__("append")
    assert "\n" not in str(told.value)
    assert list((tmp_path / "witcert").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UnsupportedError, match=r"not compiled: .*file.*; set XDG_CACHE_HOME"):
        build.compiled.__wrapped__("append")


def test_heads_of_another_size_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"heads have 72 channels; .* multiples of 16 up to 256"):
        build.check_channels(64, 72)


def exact_pool(k: torch.Tensor, q: torch.Tensor) -> Certificate:
    """The certificate of one row ``q [H, D]`` over keys ``k [S, 1, D]`` that nothing was lost of."""
    length, _, dim = k.shape
    bands = band_map(RotarySpec(dim))
    table, pages = page_table((length,), 16, torch.Generator().manual_seed(1))
    slots = table.slots(0, length, 16)
    pool = torch.full((pages, 16, 1, dim), float("nan"), dtype=k.dtype)
    pool[slots // 16, slots % 16] = k
    witness = torch.zeros(pages, 16, 1, bands.num_bands, dtype=torch.uint8)
    return certify(q[None], (pool, pool), witness, table, bands, max_kv_len=length, backend="cpu", **rows_of(length))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 80, 256])
def test_logits_err_by_less_than_is_allowed_for_them(dim: int, dtype: torch.dtype) -> None:
    """Products that cancel, of keys and queries of very different size: all that is wrong with the sum of weights."""
    g = torch.Generator().manual_seed(dim)
    k = torch.randn(200, 1, dim, generator=g) * torch.exp2(torch.rand(200, 1, dim, generator=g) * 14 - 4)
    q = torch.randn(64, dim, generator=g)
    k, q = (k - (k @ q[0])[..., None] * q[0] / q[0].square().sum()).to(dtype), q.to(dtype)
    found = exact_pool(k, q)
    z = attention_logits(q.double(), k.double(), dim**-0.5, 0.0)
    off = (found.lse[0].double() * math.log(2.0) - torch.logsumexp(z, -1)).abs()
    allowed = found.acc[0, :, AccField.M].double()
    assert bool((off <= allowed + 2.0**-23 * torch.logsumexp(z, -1).abs()).all())
    assert float((off / allowed).amax()) > 1e-3


def test_outlier_channels_that_queries_hardly_meet_do_not_widen_what_products_err_by() -> None:
    g = torch.Generator().manual_seed(4)
    k, q = torch.randn(200, 1, 64, generator=g), torch.randn(8, 64, generator=g)
    stretch = torch.ones(64)
    stretch[[3, 20, 35, 52]] = 1024.0
    plain, twin = exact_pool(k, q), exact_pool(k * stretch, q / stretch)
    assert bool((twin.omega <= plain.omega * (1.0 + 1e-6)).all())
    assert bool((meter(twin.acc)[0] <= meter(plain.acc)[0] * (1.0 + 1e-5)).all())
