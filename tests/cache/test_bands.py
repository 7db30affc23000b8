import pytest
import torch

from witcert_core.cache.bands import BandMap, band_map, group_map
from witcert_core.cache.capacity import choose_bands, side_bytes_per_head
from witcert_core.cache.norm_codes import witness_codes
from witcert_core.cache.radii import radius_witness
from witcert_core.errors import InputError
from witcert_core.policy.plugins import quantizer_registry
from witcert_core.quantizers.base import QuantContext
from witcert_core.quantizers.rotary import RotarySpec


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, None), (80, None), (96, 32), (64, 0), (20, 6)])
@pytest.mark.parametrize("num_bands", [1, 3, 16, 64])
def test_bands_are_unions_of_pairs_and_leave_pass_through_channels_apart(
    head_dim: int, rotary_dim: int | None, interleaved: bool, num_bands: int
) -> None:
    spec = RotarySpec(head_dim, rotary_dim, interleaved)
    bands = band_map(spec, num_bands)
    of_pair = bands.channel_band[spec.pair_channels()]
    assert torch.equal(of_pair[:, 0], of_pair[:, 1])
    assert len(set(of_pair[:, 0].tolist())) == min(num_bands, spec.n_pairs)
    rotary, passed = set(of_pair.flatten().tolist()), set(bands.channel_band[spec.dim :].tolist())
    assert not rotary & passed
    assert bool(passed) == (spec.dim < head_dim)


def test_the_band_of_a_pair_is_floor_i_b_over_n() -> None:
    bands = band_map(RotarySpec(128), 16)
    assert bands.channel_band[:64].tolist() == [i * 16 // 64 for i in range(64)]


def test_the_last_group_may_be_short() -> None:
    assert group_map(80).channel_band.bincount().tolist() == [32, 32, 16]


def test_norms_equal_a_plain_loop_in_any_leading_shape() -> None:
    bands = band_map(RotarySpec(24, 12), 4)
    x = torch.randn(2, 3, 24)
    for b in range(bands.num_bands):
        torch.testing.assert_close(bands.norms(x)[..., b], x.double()[..., bands.channel_band == b].norm(dim=-1))


@pytest.mark.parametrize("size", [1e-300, 5e-324, 1e300])
def test_no_square_is_lost_to_underflow_or_overflow(size: float) -> None:
    bands = BandMap(torch.tensor([0, 0, 1, 1]), 2)
    norms = bands.norms(torch.tensor([3 * size, 4 * size, 1.0, 0.0], dtype=torch.float64))
    assert norms[0].item() == pytest.approx(5 * size)
    assert norms[1].item() == 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_channel_spoils_its_own_band_only(bad: float) -> None:
    norms = BandMap(torch.tensor([0, 0, 1]), 2).norms(torch.tensor([bad, 1.0, 2.0]))
    assert not norms[0].isfinite()
    assert norms[1].item() == 2.0


MAPS = {
    "neox": band_map(RotarySpec(128)),
    "interleaved": band_map(RotarySpec(128, interleaved=True)),
    "uneven": band_map(RotarySpec(80)),
    "part": band_map(RotarySpec(128, 64)),
    "whole": group_map(24, 24),
    "turned": BandMap(torch.tensor([1, 1, 0, 0]), 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MAPS)
def test_norms_of_differences_are_rounded_up_and_no_more(name: str, dtype: torch.dtype) -> None:
    bands = MAPS[name]
    gen = torch.Generator().manual_seed(len(name))
    scale = torch.logspace(-4, 4, 60)[:, None, None]
    x = (torch.randn(60, 3, bands.head_dim, generator=gen) * scale).to(dtype)
    y = (x.float() * (1 + 1e-3 * torch.randn(x.shape, generator=gen))).to(torch.float32)
    y[::5] = x[::5]
    given = [t.clone() for t in (x, y)]
    found, true = bands.difference_norms(x, y), bands.norms(x.double() - y.double())
    assert bool((found >= true).all())
    assert bool((found <= true * (1 + 2.0**-22)).all())
    assert not found[::5].any()
    assert all(torch.equal(a, b) for a, b in zip((x, y), given, strict=True))
    for size in (1e-44, 3e37):  # as small and as large as floats go
        tiny = torch.full((bands.head_dim,), size)
        assert bool((bands.difference_norms(tiny, -tiny) >= bands.norms(2 * tiny.double())).all())


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_difference_spoils_its_own_band_only(name: str, bad: float) -> None:
    bands = MAPS[name]
    x = torch.ones(2, bands.head_dim)
    x[1, 0] = bad
    norms = bands.difference_norms(x, torch.zeros_like(x))
    spoilt = torch.zeros_like(norms, dtype=torch.bool)
    spoilt[1, bands.channel_band[0]] = True
    assert torch.equal(~norms.isfinite(), spoilt)


def test_regular_maps_are_known_as_such() -> None:
    assert {name: bands._grid for name, bands in MAPS.items()} == {
        "neox": (2, 4),
        "interleaved": (1, 8),
        "uneven": None,
        "part": None,
        "whole": (1, 24),
        "turned": None,
    }


def test_bad_maps_are_refused() -> None:
    with pytest.raises(InputError, match="every band"):
        BandMap(torch.tensor([0, 2]), 3)
    with pytest.raises(InputError, match="num_bands is 0"):
        band_map(RotarySpec(8), 0)
    with pytest.raises(InputError, match="at least 1"):
        group_map(8, 0)
    with pytest.raises(InputError, match="for 8"):
        group_map(8).norms(torch.zeros(9))


@pytest.mark.parametrize(
    ("name", "head_dim", "bits", "bands"),
    [
        ("fp8_e4m3_cast", 128, 0, 32),
        ("int8_token_group", 128, 0, 32),
        ("int4_token_group", 128, 0, 16),
        ("int4_token_group", 256, 0, 32),
        ("fp8_e4m3_cast", 64, 0, 16),
        ("int4_token_group", 128, 4, 16),
        ("int4_token_group", 256, 4, 32),
        ("int8_dither", 128, 0, 16),
        ("engine", 128, 0, 16),
    ],
)
def test_32_bands_are_kept_where_they_add_a_sixteenth_of_the_bytes_at_most(
    name: str, head_dim: int, bits: int, bands: int
) -> None:
    quantizer, rotary = quantizer_registry().get(name), RotarySpec(head_dim)
    assert choose_bands(quantizer, rotary, head_dim, bits) == bands
    assert [choose_bands(quantizer, rotary, head_dim, bits, wanted) for wanted in (16, 32)] == [16, 32]
    sides = [side_bytes_per_head(quantizer, rotary, head_dim, 2, bits, wanted) for wanted in (16, 32)]
    assert sides[1] - sides[0] == (32 if bits else 16)
    assert side_bytes_per_head(quantizer, rotary, head_dim, 2, bits) == sides[bands == 32]


@pytest.mark.parametrize("name", ["fp8_e4m3_cast", "int4_token_group"])
def test_32_bands_bound_tighter_and_never_below_the_truth(name: str) -> None:
    """Halves of a band: its norm is at most the sum that Cauchy-Schwarz makes of them, for any query."""
    torch.manual_seed(0)
    spec = RotarySpec(128)
    keys = torch.randn(40, 2, 128) * torch.logspace(-1, 1, 128)
    ctx = QuantContext((0, 1), 128, spec, torch.float32)
    stored = quantizer_registry().get(name).fake_quantize(keys, kind="k", layer=0, positions=torch.arange(40), ctx=ctx)
    q = torch.randn(4, 128, dtype=torch.float64)
    error = torch.einsum("kgd,skd->kgs", q.view(2, 2, 128), (stored - keys).double()).flatten(0, 1).abs()
    found = []
    for wanted in (16, 32):
        bands = band_map(spec, wanted)
        radius = radius_witness(q, witness_codes(keys, stored, bands), bands, 1.0)
        assert (radius >= error).all()
        found.append(radius)
    assert float((found[1] / found[0]).mean()) < 0.97
