import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from witcert_core.cache.bands import band_map
from witcert_core.cache.norm_codes import decode_norm, encode_norm_up, value_codes, witness_codes
from witcert_core.errors import InputError
from witcert_core.quantizers.rotary import RotarySpec

CODES = torch.arange(256, dtype=torch.uint8)


def encode(x: Any, dtype: torch.dtype = torch.float64) -> int:
    return int(encode_norm_up(torch.tensor([x], dtype=dtype)))


def test_levels_are_those_of_the_format() -> None:
    level = decode_norm(CODES)
    assert level[0] == 0.0
    assert level[255] == math.inf
    code = torch.arange(1, 255, dtype=torch.float64)
    exact = torch.exp2((code - 160) / 8)
    exact[238:246] = 2.0 ** (9.75 + 2 * (code[238:246] - 238))
    exact[246:] = 2.0 ** (25.75 + 12.75 * (code[246:] - 246))
    assert bool((level[1:255] >= exact).all())
    assert bool((level[1:255] <= exact * (1 + 2.0**-22)).all())
    assert level[160] == 1.0
    assert torch.equal(level.float().double(), level)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_code_boundary(dtype: torch.dtype) -> None:
    level = decode_norm(CODES)[1:255].to(dtype)
    assert encode_norm_up(level).tolist() == list(range(1, 255))
    above = torch.nextafter(level, torch.full_like(level, math.inf))
    assert encode_norm_up(above).tolist() == list(range(2, 256))
    below = torch.nextafter(level, torch.zeros_like(level))
    assert encode_norm_up(below).tolist() == list(range(1, 255))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("norm", "code"),
    [(0.0, 0), (-0.0, 0), (1e-45, 1), (1e-30, 1), (1e9, 247), (3e38, 255), (math.inf, 255), (math.nan, 255), (-1, 255)],
)
def test_special_norms(norm: float, code: int, dtype: torch.dtype) -> None:
    assert encode(norm, dtype) == code


def test_double_subnormals_are_not_zero() -> None:
    assert encode(5e-324) == 1


@settings(deadline=None)
@given(st.floats(min_value=0, allow_nan=False))
def test_decoding_never_falls_below(norm: float) -> None:
    level = decode_norm(encode_norm_up(torch.tensor([norm], dtype=torch.float64)))
    assert level.item() >= norm
    assert level.float().item() >= norm


@settings(deadline=None)
@given(st.floats(min_value=2.0**-19, max_value=860.0))
def test_rounding_up_costs_at_most_nine_percent(norm: float) -> None:
    level = decode_norm(encode_norm_up(torch.tensor([norm], dtype=torch.float64))).item()
    assert level <= norm * 2 ** (1 / 8) * (1 + 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_bound_the_band_norms_of_what_is_stored(dtype: torch.dtype) -> None:
    bands = band_map(RotarySpec(80, 40), 6)
    exact = (torch.randn(50, 3, 80) * torch.logspace(-6, 2, 50)[:, None, None]).to(dtype)
    stored = (exact.float() * (1 + 0.05 * torch.randn(exact.shape))).to(dtype)
    residual = stored.double() - exact.double()
    assert bool((decode_norm(witness_codes(exact, stored, bands)) >= bands.norms(residual)).all())
    assert bool((decode_norm(value_codes(exact, stored)) >= residual.norm(dim=-1)).all())


def test_a_norm_that_rounded_down_onto_a_level_gets_the_next_code() -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(2000, 1, 80, generator=gen, dtype=torch.float64), dim=-1)
    seen = 0
    for vector in x[:, 0]:
        exact = sum(Fraction(value) ** 2 for value in vector.tolist())
        if vector.norm() == 1.0 and exact > 1:
            seen += 1
            level = decode_norm(value_codes(torch.zeros_like(vector)[None, None], vector[None, None]))
            assert Fraction(level.item()) ** 2 >= exact
    assert seen > 20


def test_an_exact_copy_costs_nothing_and_an_unknown_one_everything() -> None:
    bands = band_map(RotarySpec(8), 2)
    x = torch.randn(4, 2, 8)
    assert not bool(witness_codes(x, x, bands).any())
    assert not bool(value_codes(x, x).any())
    spoilt = x.clone()
    spoilt[0, 0, 0] = math.nan
    spoilt[1, 1, 7] = math.inf
    codes = witness_codes(x, spoilt, bands)
    assert codes[0, 0].tolist() == [255, 0]
    assert codes[1, 1].tolist() == [0, 255]
    assert value_codes(spoilt, spoilt)[0, 0] == 255


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(InputError, match=r"torch\.uint8"):
        decode_norm(torch.zeros(2))
    with pytest.raises(InputError, match="floating"):
        encode_norm_up(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(InputError, match="must agree"):
        value_codes(torch.zeros(2, 1, 8), torch.zeros(2, 1, 4))
