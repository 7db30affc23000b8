import pytest
import torch
from rotation import inv_freq

from witcert_core.errors import InputError
from witcert_core.quantizers.rotary import RotarySpec, RotaryTable

SPECS = [
    RotarySpec(128),
    RotarySpec(80),
    RotarySpec(64, interleaved=True),
    RotarySpec(96, rotary_dim=32),
    RotarySpec(96, rotary_dim=32, interleaved=True),
    RotarySpec(64, rotary_dim=0),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_pairs_cover_the_rotary_channels_once(spec: RotarySpec) -> None:
    assert sorted(spec.pair_channels().flatten().tolist()) == list(range(spec.dim))


def test_pairing_of_both_layouts() -> None:
    assert RotarySpec(8, 4).pair_channels().tolist() == [[0, 2], [1, 3]]
    assert RotarySpec(8, 4, interleaved=True).pair_channels().tolist() == [[0, 1], [2, 3]]


def table(spec: RotarySpec) -> RotaryTable:
    angles = torch.arange(2000)[:, None] * inv_freq(spec)
    return RotaryTable(spec, torch.cat([angles.cos(), angles.sin()], -1))


def test_half_split_equals_the_rotate_half_formula_of_models() -> None:
    spec = RotarySpec(16)
    x = torch.randn(5, 2, 16)
    positions = torch.arange(5) * 100
    angle = (positions.double()[:, None] * inv_freq(spec))[:, None, :].repeat(1, 1, 2)
    half = torch.cat((-x[..., 8:], x[..., :8]), dim=-1)
    expected = x * angle.cos() + half * angle.sin()
    torch.testing.assert_close(table(spec).rotate(x, positions), expected.float())


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_rotation_keeps_pair_norms_and_undoes_itself(spec: RotarySpec) -> None:
    x = torch.randn(7, 3, spec.head_dim)
    positions = torch.randint(0, 2000, (7,))
    turned = table(spec).rotate(x, positions)
    pairs = spec.pair_channels()
    torch.testing.assert_close(turned[..., pairs].norm(dim=-1), x[..., pairs].norm(dim=-1))
    assert torch.equal(turned[..., spec.dim :], x[..., spec.dim :])
    torch.testing.assert_close(table(spec).unrotate(turned, positions), x)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(0, None), (7, None), (8, 3), (8, 10), (8, -2)])
def test_impossible_layouts_are_refused(head_dim: int, rotary_dim: int | None) -> None:
    with pytest.raises(InputError, match="must be"):
        RotarySpec(head_dim, rotary_dim)


def test_wrong_width_is_refused() -> None:
    with pytest.raises(InputError, match="head_dim=16"):
        table(RotarySpec(16)).rotate(torch.zeros(1, 1, 8), torch.zeros(1, dtype=torch.int64))
