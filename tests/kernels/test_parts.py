"""Parts of the kernels whose rounding the certificate rests on, each against exact arithmetic."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from witcert_core.cache import norm_codes as witness
from witcert_core.cache.norm_codes import encode_norm_up
from witcert_core.errors import InputError
from witcert_core.kernels.certify.triton import decode_norm
from witcert_core.kernels.decode.reference import lost_share
from witcert_core.kernels.device import codes
from witcert_core.kernels.device.digits import digit_product, query_digits
from witcert_core.kernels.device.running_sums import growth
from witcert_core.kernels.device.tiles import load_scale_tile, load_scales
from witcert_core.kernels.host.pages import check_int8_cache
from witcert_core.kernels.witness.triton import encode_up

if torch.cuda.is_available():
    pytest.skip("these kernels are run on CPU tensors, interpreted", allow_module_level=True)


@triton.jit
def product_kernel(q_ptr, code_ptr, z_ptr, unit_ptr, lost_ptr, M: tl.constexpr):
    channel, pair, token = tl.arange(0, 32), tl.arange(0, M), tl.arange(0, 32)
    q = tl.load(q_ptr + channel[:, None] * M + pair[None, :])
    digits, units, lost = query_digits((q,), 1, M)
    z = digit_product(tl.load(code_ptr + token[:, None] * 32 + channel[None, :]), digits[0], 32, M)
    tl.store(z_ptr + token[:, None] * M + pair[None, :], z)
    tl.store(unit_ptr + pair, units[0])
    tl.store(lost_ptr + pair, lost[0])


@triton.jit
def growth_kernel(c_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, growth(tl.load(c_ptr + at)))


@triton.jit
def scales_kernel(ptr, out_ptr, unknown_ptr, N: tl.constexpr, NG: tl.constexpr, TILE: tl.constexpr):
    at = tl.arange(0, N)
    live = at >= 0
    if TILE:
        s, wrong = load_scale_tile(ptr, at, live, NG, NG)
        group = tl.arange(0, NG)
        tl.store(out_ptr + at[:, None] * NG + group[None, :], s)
        unknown = tl.max(wrong.to(tl.int32), 1) > 0
    else:
        s, unknown = load_scales(ptr, at, live, NG)
        for g in tl.static_range(NG):
            tl.store(out_ptr + at * NG + g, s[g])
    tl.store(unknown_ptr + at, unknown.to(tl.int8))


def special_queries(dtype: torch.dtype, m: int) -> torch.Tensor:
    """``[32, m]``: of ordinary, wide, largest-mantissa, tiny, sparse and vanishing sizes."""
    g = torch.Generator().manual_seed(m)
    q = torch.randn(32, m, generator=g)
    q[:, 0] = torch.randn(32, generator=g) * torch.logspace(-6, 4, 32)
    q[:, 1] = torch.where(torch.arange(32) % 2 > 0, 1.9990234375, -1.9990234375)
    q[:, 2] = torch.randn(32, generator=g) * 6e-8
    q[:, 3] = torch.where(torch.arange(32) == 5, 65504.0, 0.0)
    return q.to(dtype)


def missed_bits(q: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """Error of each channel in units; half a unit is 2^-14 of the largest channel or less."""
    steps = q.double() / unit.double()
    assert bool((unit.double() <= q.double().abs().amax(dim=0).clamp(min=2.0**-83) * 2.0**-13).all())
    return (steps - steps.round()).abs()


@pytest.mark.parametrize("m", [4, 8])
def test_digits_give_the_exact_product_of_what_they_kept_and_tell_what_they_lost(m: int) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        # The interpreter has no bfloat16 products; its numbers pass through fp32 unchanged.
        q = special_queries(dtype, m).float()
        z, unit, lost = torch.zeros(32, m), torch.zeros(m), torch.zeros(m)
        tokens = torch.randint(-127, 128, (32, 32), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
        tokens[0], tokens[1] = 127, -127
        product_kernel[(1,)](q.contiguous(), tokens, z, unit, lost, M=m)
        got = z.double() * unit.double()
        whole = (q.double() / unit.double()).round()
        assert bool((whole.abs() <= 32639).all())
        assert bool((missed_bits(q, unit) <= 0.5).all())
        want = tokens.double() @ (whole * unit.double())
        assert bool(((got - want).abs() <= want.abs() * 2.0**-24).all())
        missed = (q.double() - whole * unit.double()).abs().sum(dim=0)
        assert bool((missed <= lost.double() * (1 + 2.0**-18)).all())
        assert bool(
            ((tokens.double() @ q.double() - got).abs() <= 127 * lost.double() * 1.001 + want.abs() * 2.0**-24).all()
        )
        share = torch.where(q.abs().sum(dim=0) > 0, lost / q.abs().sum(dim=0), torch.zeros(m)).double()
        torch.testing.assert_close(lost_share(q.T)[:, 0], share, rtol=1e-5, atol=1e-12)
        # Eight bits of an ordinary query, all channels within 2^7 of the largest, fit whole.
        near = torch.where(q[:, :1].abs() > 0, torch.linspace(0.02, 1.0, 32)[:, None].expand(32, m), 0.0)
        product_kernel[(1,)](near.bfloat16().float().contiguous(), tokens, z, unit, lost, M=m)
        assert not bool(lost.any())
    for wrong in (float("nan"), float("inf")):
        q = torch.ones(32, m)
        q[7, 1] = wrong
        product_kernel[(1,)](q, tokens, z, unit, lost, M=m)
        assert unit.isnan().tolist() == [i == 1 for i in range(m)]


def test_growth_is_never_below_expm1_and_adds_less_than_the_softmax_radius() -> None:
    c = torch.cat((torch.zeros(1), torch.logspace(-12, 1.9, 4095)))
    out = torch.zeros(4096)
    growth_kernel[(1,)](c, out, N=4096)
    exact = torch.expm1(c.double())
    over = out.double() - exact
    assert bool((over >= 0).all())
    assert bool((over <= 2.0**-20 * (exact + 1) * (1 + c.double())).all())


@pytest.mark.parametrize(("groups", "tile"), [(2, False), (1, False), (2, True)])
def test_every_fp16_is_a_scale_or_unknown(groups: int, tile: bool) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    pairs = torch.stack((bits, bits.roll(12345)), dim=1)[:, :groups].contiguous()
    s, unknown = torch.zeros(2**16, groups), torch.zeros(2**16, dtype=torch.int8)
    source = pairs.view(torch.float16) if tile or groups == 1 else pairs.view(torch.int32)
    scales_kernel[(1,)](source, s, unknown, N=2**16, NG=groups, TILE=tile)
    number = pairs.view(torch.float16).float()
    good = number.isfinite() & ~torch.signbit(number)
    assert torch.equal(s, torch.where(good, number, torch.zeros_like(number)))
    assert torch.equal(unknown > 0, ~good.all(dim=1))


def run_ptx(source: str, registers: dict[str, int]) -> None:
    """The few instructions of ``codes.py`` on 32-bit ``registers``, as the PTX manual defines them."""

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    def signed(word: int, i: int) -> int:
        return ((word >> 8 * i & 255) ^ 128) - 128

    def half(word: int, i: int) -> torch.Tensor:
        return torch.tensor([word >> 16 * i & 0xFFFF], dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()

    for opcode, operands in re.findall(r"([a-z0-9]+(?:\.[a-z0-9]+)+) ([^;.]+);", source):
        target, *names = [x.strip() for x in operands.split(",")]
        a, *more = [value(x) for x in names]
        match opcode:
            case "mov.b32":
                result = a
            case "prmt.b32":
                pool = a | more[0] << 32
                result = sum((pool >> 8 * (more[1] >> 4 * i & 7) & 255) << 8 * i for i in range(4))
            case "lop3.b32":
                assert more[2] == 0xEA
                result = a & more[0] | more[1]
            case "fma.rn.bf16x2":
                exact = [half(a, i) * half(more[0], i) + half(more[1], i) for i in range(2)]
                assert all(x == x.bfloat16().double() for x in exact)
                result = sum((int(x.bfloat16().view(torch.int16)) & 0xFFFF) << 16 * i for i, x in enumerate(exact))
            case "dp4a.s32.s32":
                result = sum(signed(a, i) * signed(more[0], i) for i in range(4)) + more[1]
            case _:
                raise AssertionError(opcode)
        registers[target] = result


def test_assembly_for_gpus_gives_every_code_and_its_square() -> None:
    for first in range(-128, 128, 4):
        four = [first, first + 1, first + 2, first + 3]
        word = sum((x & 255) << 8 * i for i, x in enumerate(four))
        registers: dict[str, Any] = {"$2": word}
        run_ptx(re.sub(r"\.reg[^;]*;", "", codes._BFLOAT16.value), registers)
        halves = [registers[f"${i // 2}"] >> 16 * (i % 2) & 0xFFFF for i in range(4)]
        assert torch.tensor(halves).to(torch.int16).view(torch.bfloat16).tolist() == four
        registers = {"$1": word}
        run_ptx(codes._SQUARES.value, registers)
        assert registers["$0"] == sum(x * x for x in four)


@triton.jit
def squares_kernel(v_ptr, out_ptr, D: tl.constexpr, GV: tl.constexpr):
    token, group = tl.arange(0, 4), tl.arange(0, GV)
    squares = codes.code_squares(v_ptr + token * D, D, GV)
    tl.store(out_ptr + token[:, None] * GV + group[None, :], squares)


@pytest.mark.parametrize("head_dim", [32, 80, 128])
def test_squares_of_words_are_those_of_their_codes(head_dim: int) -> None:
    v = torch.randint(-128, 128, (5, head_dim), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    v[0, :4] = torch.tensor([-128, 127, 0, -1])
    groups = triton.next_power_of_2(-(-head_dim // 32))
    found = torch.full((4, groups), -1.0)
    squares_kernel[(1,)](v, found, head_dim, groups)
    square = torch.nn.functional.pad(v[:4].double().square(), (0, groups * 32 - head_dim))
    assert torch.equal(found.double(), square.unflatten(1, (groups, 32)).sum(-1))


def test_codes_that_cannot_be_read_as_words_are_refused() -> None:
    k = torch.zeros(2, 1, 1, 64, dtype=torch.int8)
    v = torch.zeros(2 * 64 + 2, dtype=torch.int8)[2:].view(2, 1, 1, 64)
    scales = torch.zeros(2, 1, 1, 2, dtype=torch.float16)
    with pytest.raises(InputError, match="begin 2 bytes into their memory"):
        check_int8_cache(k, v, scales, scales)


@triton.jit
def codes_kernel(square_ptr, code_ptr, level_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    square = tl.load(square_ptr + i)
    code = encode_up(square, square)
    tl.store(code_ptr + i, code)
    tl.store(level_ptr + i, decode_norm(code))


def test_codes_of_norms_are_never_below_them_up_to_two_to_the_sixty_four() -> None:
    """Fine steps, factors of 4 and the last eight: the kernels' codes are those of the reference, or one above."""
    count = 4096
    exponent = torch.linspace(-120.0, 127.9, count, dtype=torch.float64)
    square = torch.exp2(exponent).float()
    found, levels = torch.zeros(count, dtype=torch.uint8), torch.zeros(count)
    codes_kernel[(1,)](square, found, levels, N=count)
    norm = square.double().sqrt()
    above = found.int() - encode_norm_up(norm).int()
    assert bool((above >= 0).all())
    assert bool((above <= 1).all())
    assert bool((levels.double() >= norm).all())
    assert bool((levels.double() >= witness.decode_norm(found) * (1 - 2.0**-24)).all())
    assert len(set(found.tolist())) == 246 + 3, "norms of float32 squares end in the third of the last eight"
