import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.quantizers import dither
from witcert_core.quantizers.dither import DitherKey

KEY = DitherKey(seed=7, nonce=11)


def philox_in_integers(counter: Sequence[int], key: tuple[int, int], rounds: int = 10) -> list[int]:
    """Philox4x32 again, in Python integers, from its definition."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(second >> 32) ^ c[1] ^ k[0], second % 2**32, (first >> 32) ^ c[3] ^ k[1], first % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def philox(counter: Sequence[int], key: tuple[int, int]) -> list[int]:
    a, b, c, d = (torch.tensor(x) for x in counter)
    words = dither.philox4x32((a, b, c, d), key)
    return [int(x) for x in words]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # known answers of Random123's philox4x32-10
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, (2**32 - 1,) * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: Sequence[int], key: tuple[int, int], words: list[int]) -> None:
    assert philox(counter, key) == words
    assert philox_in_integers(counter, key) == words


word = st.integers(0, 2**32 - 1)


@settings(deadline=None)
@given(st.tuples(word, word, word, word), st.tuples(word, word))
def test_philox_against_integers(counter: Sequence[int], key: tuple[int, int]) -> None:
    assert philox(counter, key) == philox_in_integers(counter, key)


def test_a_row_is_the_bytes_of_its_counter() -> None:
    ids, heads, layer, dim = [1, 2**32 - 2], [5, 9], 3, 80
    u = dither.dither_vectors(KEY, torch.tensor(ids), layer, heads, dim)
    assert u.shape == (2, 2, 80)
    assert u.dtype == torch.float32
    for n, row in enumerate(ids):
        for h, head in enumerate(heads):
            data = b"".join(
                b"".join(x.to_bytes(4, "little") for x in philox_in_integers((row, layer, head, block), KEY.words()))
                for block in range(5)
            )
            assert u[n, h].tolist() == [(j + 0.5) / 256 - 0.5 for j in data]


def test_rows_depend_on_row_layer_global_head_and_key_and_nothing_else() -> None:
    base = dither.dither_vectors(KEY, torch.tensor([4]), 2, [1], 64)
    assert torch.equal(dither.dither_vectors(KEY, torch.tensor([9, 4]), 2, [0, 1], 64)[1:, 1:], base)
    others = [
        dither.dither_vectors(KEY, torch.tensor([5]), 2, [1], 64),
        dither.dither_vectors(KEY, torch.tensor([4]), 3, [1], 64),
        dither.dither_vectors(KEY, torch.tensor([4]), 2, [2], 64),
        dither.dither_vectors(DitherKey(8, 11), torch.tensor([4]), 2, [1], 64),
        dither.dither_vectors(DitherKey(7, 12), torch.tensor([4]), 2, [1], 64),
        dither.dither_vectors(DitherKey(7, 11, 1), torch.tensor([4]), 2, [1], 64),
    ]
    for other in others:
        # Independent rows agree in one channel of 256.
        assert int((other == base).sum()) < 8


def test_rows_are_uniform_on_the_grid() -> None:
    u = dither.dither_vectors(KEY, torch.arange(1, 2001), 0, [0, 1], 128)
    counts = torch.bincount(((u + 0.5) * 256 - 0.5).round().long().flatten(), minlength=256)
    expected = u.numel() / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert 160 < chi_square < 370  # 255 degrees of freedom, five standard deviations
    assert abs(float((u[:, :, :-1] * u[:, :, 1:]).mean())) < 5 / 12 / math.sqrt(u.numel())


def smallest_half_scale(amax: float) -> float:
    """Smallest fp16 s with 127 s >= amax, by search over all of them."""
    every = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).double()
    index = int(torch.searchsorted(every * 127.0, torch.tensor(amax, dtype=torch.float64)))
    return math.inf if index == every.numel() else every[index].item()


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.floats(0, 2.0**24, width=32),
        st.floats(0, 2.0**-13, width=32),
        st.floats(2.0**22, 2.0**24, width=32),
    )
)
def test_scale_is_the_smallest_that_does_not_clip(amax: float) -> None:
    x = torch.tensor([[[amax, -amax / 3]]], dtype=torch.float32)
    assert dither.group_scales(x).item() == smallest_half_scale(float(x.abs().max()))


def hostile_keys() -> Tensor:
    gen = torch.Generator().manual_seed(0)
    random = torch.randn(600, 2, 80, generator=gen) * torch.logspace(-9, 6, 600)[:, None, None]
    steps = torch.randint(-127, 128, (200, 2, 80), generator=gen).float()
    steps[..., 0] = 127.0
    ties = steps * 0.125 + 0.0625
    edges = torch.where(torch.rand(100, 2, 80, generator=gen) < 0.5, -3.0, 3.0)
    zeros = torch.zeros(2, 2, 80)
    spikes = torch.zeros(50, 2, 80)
    spikes[..., 40] = torch.logspace(-12, 6.9, 50)[:, None]
    return torch.cat((random, steps, ties, edges, zeros, spikes))


def test_residual_stays_within_half_a_step_and_codes_within_127() -> None:
    x = hostile_keys()
    u = dither.dither_vectors(KEY, torch.arange(1, len(x) + 1), 0, [0, 1], 80)
    codes, scales = dither.quantize_int8(x, u)
    residual = dither.dequantize_int8(codes, scales, u).double() - x.double()
    step = scales.double().repeat_interleave(32, -1)[..., :80]
    assert int(codes.min()) >= -127
    assert bool((residual.abs() <= 0.5 * step * (1 + 2.0**-15)).all())
    assert scales.shape == (len(x), 2, 3)
    assert torch.equal(scales, dither.quantize_int8(x, torch.zeros_like(x))[1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 8.4e6])
def test_what_fp16_cannot_scale_gets_an_infinite_scale_never_a_clipped_code(bad: float) -> None:
    x = torch.randn(1, 1, 64)
    x[0, 0, 3] = bad
    u = dither.dither_vectors(KEY, torch.tensor([1]), 0, [0], 64)
    codes, scales = dither.quantize_int8(x, u)
    assert scales[0, 0, 0] == math.inf
    assert scales[0, 0, 1].isfinite()
    stored = dither.dequantize_int8(codes, scales, u)
    assert bool(stored.isfinite().all())
    assert not bool(stored[..., :32].any())
    assert dither.decode_group_witness(dither.group_witness_codes(x, stored, scales), scales)[0, 0, 0] == math.inf


@pytest.mark.parametrize("bits", range(1, 9))
def test_grid_law_bias_and_proxy_exactly(bits: int) -> None:
    """For every offset the residual is uniform on 2^n points s/2^n apart, and its mean within s/2^(n+1)."""
    size = 2**bits
    proxy = Fraction(1, 12) * (1 - Fraction(1, 4**bits))
    signs = sum(Fraction(1, 4**k) for k in range(2, bits + 2))
    assert signs == proxy  # variances of independent signs of sizes s/4, s/8, ...
    unit = 4 * size  # everything below is an integer number of s/unit
    for tie in (0, 1):  # both tie rules of round()
        for x in range(unit):
            residuals = []
            for j in range(size):
                u = 4 * j + 2 - unit // 2
                shifted = x + u + unit // 2
                rounded = shifted // unit - (1 if tie and shifted % unit == 0 else 0)
                residuals.append(rounded * unit - u - x)
            residuals.sort()
            assert {b - a for a, b in pairwise(residuals)} <= {4}
            assert -unit <= 2 * residuals[0]
            assert 2 * residuals[-1] <= unit
            assert abs(sum(residuals)) <= 2 * size
            spread = size * sum(r * r for r in residuals) - sum(residuals) ** 2
            assert Fraction(spread, (size * unit) ** 2) == proxy
    for rate in (0.1, 1.0, 3.0, 10.0, 40.0):
        product = math.fsum(math.log(math.cosh(rate / 2**k)) for k in range(2, bits + 2))
        points = [(j + 0.5) / size - 0.5 for j in range(size)]
        mgf = math.log(math.fsum(math.exp(rate * p) for p in points) / size)
        assert mgf == pytest.approx(product, rel=1e-9)
        assert product <= rate * rate / 2 * float(proxy)


def test_the_quantizer_follows_that_law() -> None:
    u = ((torch.arange(256) + 0.5) / 256 - 0.5).reshape(256, 1, 1).expand(256, 1, 32)
    x = torch.randn(32).repeat(256, 1, 1)
    codes, scales = dither.quantize_int8(x, u)
    residual = (dither.dequantize_int8(codes, scales, u).double() - x.double())[:, 0] / scales.double()[0, 0, 0]
    assert bool((residual.mean(0).abs() <= 1 / 512 + 1e-5).all())
    assert torch.allclose(residual.var(0, unbiased=False), torch.tensor((1 - 4.0**-8) / 12).double(), atol=1e-5)


@pytest.mark.parametrize("dim", [32, 80, 128])
def test_group_witness_bounds_the_residual_and_is_tight(dim: int) -> None:
    x = torch.randn(200, 2, dim)
    u = dither.dither_vectors(KEY, torch.arange(1, 201), 0, [0, 1], dim)
    codes, scales = dither.quantize_int8(x, u)
    stored = dither.dequantize_int8(codes, scales, u)
    bound = dither.decode_group_witness(dither.group_witness_codes(x, stored, scales), scales)
    pad = -dim % 32
    norm = torch.nn.functional.pad(stored.double() - x.double(), (0, pad)).unflatten(-1, (-1, 32)).norm(dim=-1)
    assert bool((bound >= norm).all())
    assert bool((bound <= norm + 1.01 * scales.double() * 32**0.5 / 510).all())


def test_group_witness_holds_the_fp32_rounding_of_half_a_step_in_every_channel() -> None:
    scales = torch.rand(50, 1, 1).half()
    residual = (0.5 * (1 + 2.0**-15) * scales.double()).expand(50, 1, 32)
    codes = dither.group_witness_codes(torch.zeros_like(residual), residual, scales)
    assert codes.unique().tolist() == [255]
    assert bool((dither.decode_group_witness(codes, scales)[..., 0] >= residual.norm(dim=-1)).all())


def test_group_witness_refuses_what_it_cannot_hold() -> None:
    x = torch.ones(1, 1, 32)
    scales = torch.full((1, 1, 1), 0.01, dtype=torch.float16)
    with pytest.raises(InputError, match="1 groups"):
        dither.group_witness_codes(x, x + 1.0, scales)
    with pytest.raises(InputError, match="1 groups"):
        dither.group_witness_codes(x, x * math.nan, scales)


def test_zero_keys_are_exact() -> None:
    x = torch.zeros(1, 1, 32)
    u = dither.dither_vectors(KEY, torch.tensor([1]), 0, [0], 32)
    codes, scales = dither.quantize_int8(x, u)
    stored = dither.dequantize_int8(codes, scales, u)
    assert not bool(stored.any())
    assert dither.decode_group_witness(dither.group_witness_codes(x, stored, scales), scales).item() == 0.0


@pytest.mark.parametrize(("row", "layer", "head"), [(2**32, 0, 0), (-1, 0, 0), (1, -1, 0), (1, 2**32, 0), (1, 0, -1)])
def test_counters_that_would_wrap_are_refused(row: int, layer: int, head: int) -> None:
    with pytest.raises(InputError, match=r"pass ids|layer|head id"):
        dither.dither_vectors(KEY, torch.tensor([row]), layer, [head], 32)


@pytest.mark.parametrize("layer", [0, 5, 31, 32, 63, 2**32 - 1])
def test_the_dither_of_one_pass_is_that_of_several_and_of_a_device(layer: int) -> None:
    """Layers of a pass are drawn together on the host; what is drawn depends on nothing but its own counter."""
    key, heads, ids = DitherKey(3, 4), [2, 7], torch.tensor([9, 9, 9])
    alone = dither.dither_vectors(key, ids, layer, heads, 40)
    among = dither.dither_vectors(key, torch.tensor([9, 11]), layer, heads, 40)
    elsewhere = dither.dither_vectors(key, ids.to("meta"), layer, heads, 40)
    assert alone.shape == elsewhere.shape == (3, 2, 40)
    assert torch.equal(alone, among[:1].expand(3, -1, -1))
    assert not torch.equal(among[0], among[1])
    assert not torch.equal(alone, dither.dither_vectors(key, ids, layer - 1 if layer else 1, heads, 40))
