import math

import pytest
import torch
from rotation import rotate
from torch import Tensor

from witcert_core.cache import radii
from witcert_core.cache.bands import band_map, group_map
from witcert_core.cache.norm_codes import decode_norm, witness_codes
from witcert_core.errors import BudgetError, InputError
from witcert_core.meter.kernel_error import arithmetic_radius
from witcert_core.quantizers import dither
from witcert_core.quantizers.dither import DitherKey
from witcert_core.quantizers.rotary import RotarySpec

SPECS = [
    RotarySpec(128),
    RotarySpec(80),
    RotarySpec(64, interleaved=True),
    RotarySpec(96, rotary_dim=32),
    RotarySpec(96, rotary_dim=32, interleaved=True),
]


def logit_errors(q: Tensor, exact: Tensor, stored: Tensor, sm_scale: float) -> Tensor:
    """Signed errors [H, S] in float64."""
    group = q.shape[0] // exact.shape[1]
    residual = (stored.double() - exact.double()).repeat_interleave(group, dim=1)
    return torch.einsum("hd,shd->hs", q.double(), residual) * sm_scale


def dithered(
    tokens: int, kv_heads: int, dim: int, seed: int, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, kv_heads, dim, generator=gen)
    if scale is not None:
        x = x * scale
    u = dither.dither_vectors(DitherKey(seed, 0), torch.arange(1, tokens + 1), 0, range(kv_heads), dim)
    codes, scales = dither.quantize_int8(x, u)
    return x, dither.dequantize_int8(codes, scales, u), scales


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("group", [1, 4])
def test_witness_radius_covers_every_logit(spec: RotarySpec, group: int) -> None:
    bands = band_map(spec, 6)
    exact = torch.randn(60, 2, spec.head_dim).to(torch.bfloat16)
    stored = (exact.float() + 0.1 * torch.randn(exact.shape)).to(torch.float8_e4m3fn).float()
    q = torch.randn(2 * group, spec.head_dim)
    c = radii.radius_witness(q, witness_codes(exact, stored, bands), bands, -0.125)
    error = logit_errors(q, exact, stored, 0.125)
    assert c.shape == error.shape
    assert bool((c >= error.abs()).all())


def test_witness_radius_is_tight_along_the_residual() -> None:
    """A query parallel to the residual in every band: only the rounding of the code is lost."""
    bands = band_map(RotarySpec(32), 4)
    residual = torch.randn(1, 1, 32)
    c = radii.radius_witness(residual[0], witness_codes(torch.zeros(1, 1, 32), residual, bands), bands, 1.0)
    error = residual.double().square().sum()
    assert error <= c.item() <= error * 2 ** (1 / 8) * (1 + 1e-6)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_witness_taken_before_the_rotation_needs_the_right_pairing(spec: RotarySpec) -> None:
    """One pair per band, so that a wrong pairing cannot pass by luck."""
    right = band_map(spec, spec.n_pairs)
    wrong = band_map(RotarySpec(spec.head_dim, spec.rotary_dim, not spec.interleaved), spec.n_pairs)
    gen = torch.Generator().manual_seed(3)
    before = torch.randn(400, 1, spec.head_dim, generator=gen, dtype=torch.float64)
    before = before * torch.rand(before.shape, generator=gen, dtype=torch.float64) ** 8
    turned = rotate(spec, before, torch.randint(0, 5000, (400,), generator=gen))
    zero = torch.zeros_like(before)
    broken = 0
    for n in range(50):  # the query that lies along one rotated residual
        q = turned[n] + 1e-3
        error = logit_errors(q, zero, turned, 1.0).abs()
        assert bool((radii.radius_witness(q, witness_codes(zero, before, right), right, 1.0) >= error).all())
        broken += int((radii.radius_witness(q, witness_codes(zero, before, wrong), wrong, 1.0) < error).sum())
    assert broken > 0


def test_collapsing_the_bands_would_be_far_looser() -> None:
    bands = band_map(RotarySpec(128), 16)
    residual = torch.zeros(1, 1, 128)
    residual[..., 0] = 1.0
    q = torch.full((1, 128), 1e-3)
    q[0, 63] = 10.0
    codes = witness_codes(torch.zeros_like(residual), residual, bands)
    collapsed = q.norm() * decode_norm(codes).sum()
    assert collapsed / radii.radius_witness(q, codes, bands, 1.0).item() > 1000


@pytest.mark.parametrize("dim", [32, 80, 128])
def test_group_witness_radius_covers_and_beats_the_half_step(dim: int) -> None:
    exact, stored, scales = dithered(300, 2, dim, seed=1)
    q = torch.randn(4, dim)
    codes = dither.group_witness_codes(exact, stored, scales)
    c = radii.radius_group_witness(q, scales, codes, 0.1)
    assert bool((c >= logit_errors(q, exact, stored, 0.1).abs()).all())
    assert c.mean() < 0.8 * radii.radius_dither(q, scales, 0.1, 0.0, 300).mean()


@pytest.mark.parametrize("dim", [32, 80, 128])
def test_half_step_radius_holds_for_the_worst_query(dim: int) -> None:
    exact, stored, scales = dithered(500, 1, dim, seed=2)
    for n in range(0, 500, 25):
        q = (stored[n] - exact[n]).sign() * (1.0 + torch.rand(dim))
        c = radii.radius_dither(q, scales, 0.3, 0.0, 500)
        assert bool((c >= logit_errors(q, exact, stored, 0.3).abs()).all())


def test_dither_radius_is_the_formula() -> None:
    _, _, scales = dithered(5, 1, 80, seed=4)
    q = torch.randn(1, 80, dtype=torch.float64)
    s = scales.double()[:, 0]
    l1 = torch.stack([q[0, g * 32 : (g + 1) * 32].abs().sum() for g in range(3)])
    l2 = torch.stack([q[0, g * 32 : (g + 1) * 32].square().sum() for g in range(3)])
    sigma = 0.1 * ((s.square() * l2).sum(-1) * (1 - 4.0**-8) / 12).sqrt()
    bias = 0.1 * (s * l1).sum(-1) * (2.0**-9 + 2.0**-16)
    likely = math.sqrt(2 * math.log(2 * 100 / 1e-5)) * sigma + bias
    certain = (1 + 2.0**-15) * 0.1 * (0.5 * s * l1).sum(-1)
    c = radii.radius_dither(q, scales, 0.1, 1e-5, 100)[0]
    torch.testing.assert_close(c, torch.minimum(likely, certain), rtol=1e-9, atol=0)
    assert bool((c >= torch.minimum(likely, certain)).all())
    assert bool((likely < certain).all())
    tiny = radii.radius_dither(q, scales, 0.1, 1e-300, 100)[0]
    torch.testing.assert_close(tiny, certain, rtol=1e-9, atol=0)
    torch.testing.assert_close(radii.radius_dither(q, scales, 0.1, 0.0, 100)[0], certain, rtol=1e-9, atol=0)


def test_dither_radius_fails_no_more_often_than_its_share() -> None:
    """delta_loc = 0.2 over 200 rows of 16 tokens: at most a fifth of the rows may contain a failure."""
    rows, tokens, failed, reached = 200, 16, 0, 0.0
    exact, stored, scales = dithered(rows * tokens, 1, 64, seed=5)
    q = torch.randn(1, 64)
    for r in range(rows):
        part = slice(r * tokens, (r + 1) * tokens)
        c = radii.radius_dither(q, scales[part], 1.0, 0.2, tokens)
        error = logit_errors(q, exact[part], stored[part], 1.0).abs()
        failed += int((error > c).any())
        reached = max(reached, float((error / c).max()))
    assert failed <= 0.2 * rows
    assert reached > 0.7  # the radius is not merely loose


def test_more_tokens_and_less_delta_widen_the_radius() -> None:
    _, _, scales = dithered(5, 1, 128, seed=6)
    q = torch.randn(1, 128)
    base = radii.radius_dither(q, scales, 1.0, 1e-4, 5)
    assert bool((radii.radius_dither(q, scales, 1.0, 1e-4, 500) > base).all())
    assert bool((radii.radius_dither(q, scales, 1.0, 1e-6, 5) > base).all())


def test_the_unknown_is_infinite_in_every_tier() -> None:
    bands, groups = band_map(RotarySpec(32), 4), group_map(32)
    codes = torch.zeros(3, 1, 4, dtype=torch.uint8)
    codes[1, 0, 2] = 255
    q = torch.randn(2, 32)
    q[:, :20] = 0.0
    assert radii.radius_witness(q, codes, bands, 1.0).isinf().tolist() == [[False, True, False]] * 2
    scales = torch.ones(3, 1, 1, dtype=torch.float16)
    scales[2] = math.inf
    scales[0] = math.nan
    marks = [[True, False, True]] * 2
    assert radii.radius_dither(q, scales, 1.0, 1e-3, 3).isinf().tolist() == marks
    assert radii.radius_dither(q, scales, 1.0, 0.0, 3).isinf().tolist() == marks
    group_codes = torch.zeros(3, 1, groups.num_bands, dtype=torch.uint8)
    assert radii.radius_group_witness(q, scales, group_codes, 1.0).isinf().tolist() == marks
    spoilt = q.clone()
    spoilt[1, 0] = math.nan
    for c in (
        radii.radius_witness(spoilt, torch.zeros_like(codes), bands, 1.0),
        radii.radius_dither(spoilt, torch.ones_like(scales), 1.0, 1e-3, 3),
        arithmetic_radius(spoilt, torch.zeros(3, 1, 32), 1.0),
    ):
        assert c.isinf().tolist() == [[False] * 3, [True] * 3]


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_arithmetic_radius_covers_fp32_dot_products(dim: int) -> None:
    q, k = torch.randn(4, dim) * 10, torch.randn(500, 2, dim) * torch.logspace(-3, 3, 500)[:, None, None]
    single = torch.einsum("hd,shd->hs", q, k.repeat_interleave(2, dim=1)) * 0.1
    exact = torch.einsum("hd,shd->hs", q.double(), k.double().repeat_interleave(2, dim=1)) * 0.1
    assert bool((arithmetic_radius(q, k, 0.1) >= (single.double() - exact).abs()).all())


def test_wrong_arguments_are_refused() -> None:
    scales = torch.ones(1, 1, 1, dtype=torch.float16)
    with pytest.raises(BudgetError, match=r"delta_loc is 1\.0"):
        radii.radius_dither(torch.zeros(1, 32), scales, 1.0, 1.0, 1)
    with pytest.raises(InputError, match="num_visible is 0"):
        radii.radius_dither(torch.zeros(1, 32), scales, 1.0, 0.1, 0)
    with pytest.raises(InputError, match="3 query heads"):
        arithmetic_radius(torch.zeros(3, 8), torch.zeros(1, 2, 8), 1.0)
    with pytest.raises(InputError, match="sm_scale is nan"):
        arithmetic_radius(torch.zeros(2, 8), torch.zeros(1, 2, 8), math.nan)
    codes = torch.zeros(1, 1, 5, dtype=torch.uint8)
    with pytest.raises(InputError, match="5 bands"):
        radii.radius_witness(torch.zeros(1, 32), codes, band_map(RotarySpec(32), 4), 1.0)
