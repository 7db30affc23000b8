"""Every installed quantizer, built in or brought by a plugin, joins these by itself.

A new plugin is picked up once it is installed. One with parameters worth trying says so in `VARIANTS`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import entry_points, requires, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from plugin_serving import rotary_table
from rotation import rotate
from torch import Tensor

from witcert_core import CalibratedQuantizer, CodedQuantizer, QuantContext, Quantizer, RotarySpec, check_quantizer
from witcert_core.cache.bands import band_map
from witcert_core.cache.norm_codes import decode_norm, value_codes, witness_codes
from witcert_core.policy.plugins import quantizer_registry
from witcert_core.quantizers import apply
from witcert_core.quantizers.dither import DitherKey
from witcert_core.quantizers.rotary import RotaryTable

ROOT = Path(__file__).parents[2]
REGISTRY = quantizer_registry()
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "kivi": [{"bits": 2}, {"bits": 4, "residual": 32, "group_size": 48}],
    "kvquant": [{"bits": 2}, {"bits": 3, "outliers": 0.0}, {"bits": 4, "outliers": 0.05}],
    "rotated": [{"bits": 1}, {"bits": 2}, {"bits": 3, "seed": 9}, {"bits": 4}],
    "nvfp4": [{}, {"k_scale": 0.01, "v_scale": 0.001}],
    "skvq": [{"bits": 2}, {"bits": 4, "group_size": 48, "window": 0, "calibration_tokens": 9}],
    "fp8_calibrated": [{"margin": 1.0, "calibration_tokens": 5}],
}
CASES = [(name, params) for name in REGISTRY.names() for params in VARIANTS.get(name, [{}])]
IDS = ["-".join([name, *(f"{key}={value}" for key, value in params.items())]) for name, params in CASES]
every_case = pytest.mark.parametrize(("name", "params"), CASES, ids=IDS)


def run(quant: Quantizer, x: Tensor, kind: str = "k", spec: RotarySpec | None = None, **changes: Any) -> Tensor:
    """x~ for post-RoPE x [N, H, D], N whole groups, far from the start; calibrated on x itself."""
    positions = torch.arange(len(x)) + 128 * quant.token_group
    spec = spec or RotarySpec(x.shape[-1])
    ctx = QuantContext(
        head_ids=tuple(range(x.shape[1])),
        head_dim=x.shape[-1],
        rotary=spec,
        storage_dtype=torch.bfloat16,
        pass_ids=positions + 1,
        dither_key=DitherKey(1, 2),
    )
    table = changes.get("table") or rotary_table(spec=spec, positions=128 * quant.token_group + len(x))
    known: dict[str, Any] = {"kind": kind, "layer": 0, "table": table}
    if isinstance(quant, CalibratedQuantizer):
        first = x.repeat(-(-quant.calibration_tokens // len(x)), 1, 1)[: quant.calibration_tokens]
        state = apply.calibrate(quant, first, positions=torch.arange(len(first)), ctx=ctx, **known)
        ctx = replace(ctx, state=state.expand(len(x), -1, -1))
    return apply.fake_quantize(quant, x, positions=positions, ctx=ctx, **known)


def tokens(quant: Quantizer, groups: int = 4, heads: int = 2, dim: int = 64, seed: int = 0) -> Tensor:
    x = torch.randn(groups * quant.token_group, heads, dim, generator=torch.Generator().manual_seed(seed))
    x[:, 0, 3] += 15.0
    return x


def error(quant: Quantizer, x: Tensor, kind: str) -> float:
    return float((run(quant, x, kind) - x).norm() / x.norm())


@pytest.mark.parametrize("head_dim", [16, 20, 80, 96, 128])
@every_case
def test_contract(name: str, params: dict[str, Any], head_dim: int) -> None:
    """Alone as in any batch, head by head, NaN kept apart, no NaN made, codes within their bits, bytes as declared."""
    if head_dim not in (16, 20) or name not in REGISTRY.from_package("witcert_core"):  # those have tests of their own
        check_quantizer(REGISTRY.get(name, params), head_dim)


@every_case
@pytest.mark.parametrize("kind", ["k", "v"])
def test_awkward_inputs(name: str, params: dict[str, Any], kind: str) -> None:
    """Zero stays zero but for a rounding; constants, outliers and huge values come back finite and in their range."""
    quant = REGISTRY.get(name, params)
    zero = torch.zeros(4 * quant.token_group, 2, 80)
    assert run(quant, zero, kind).abs().max() <= 1e-6
    for x in (zero + 3.0, tokens(quant, dim=80) * 1e4, tokens(quant, dim=80) * 1e-7):
        out = run(quant, x, kind)
        assert out.isfinite().all()
        assert out.abs().max() <= 8 * x.abs().max()
    mixed = tokens(quant, dim=80)
    mixed[: quant.token_group, 0] = 0.0
    if kind == "v":  # a key of zeros is one of many before RoPE or beside a calibrated range
        assert run(quant, mixed, kind)[: quant.token_group, 0].abs().max() <= 1e-6
    lone = zero.clone()
    lone[:, 1, 7] = 100.0
    out = run(quant, lone, kind)
    assert out.isfinite().all()
    assert (out[:, 0] == 0).all() or out[:, 0].abs().max() <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@every_case
def test_witnesses_cover_what_is_stored(name: str, params: dict[str, Any], dtype: torch.dtype) -> None:
    """Whatever the pool's dtype: the stored norms are at least the true ones, with NaN infinite."""
    quant, bands = REGISTRY.get(name, params), band_map(RotarySpec(64))
    exact = tokens(quant).to(dtype)
    stored = run(quant, exact.float()).to(dtype)
    codes = decode_norm(witness_codes(exact, stored, bands))
    assert (bands.norms(stored.double() - exact.double()) <= codes).all()
    spoiled = exact.clone()
    spoiled[-1, 1, 7] = float("nan")
    for kind in ("k", "v"):
        stored = run(quant, spoiled.float(), kind).to(dtype)
        assert decode_norm(value_codes(spoiled, stored))[-1, 1].isinf()
        if quant.state == "none":
            assert decode_norm(value_codes(spoiled, stored))[:, 0].isfinite().all()


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("name", sorted(n for n in REGISTRY.names() if "bits" in REGISTRY.parameters(n)))
def test_more_bits_err_less(name: str, kind: str) -> None:
    bits = (2, 4) if name == "kivi" else (2, 3, 4)
    errors = [error(REGISTRY.get(name, {"bits": b}), tokens(REGISTRY.get(name, {"bits": b}), 8), kind) for b in bits]
    assert all(later < 0.75 * earlier for earlier, later in pairwise(errors))
    assert errors[-1] < 0.2


@every_case
def test_no_more_levels_than_bits(name: str, params: dict[str, Any]) -> None:
    """What shares a scale takes at most 2^bits values, counted in what comes out, per channel and per token."""
    quant = REGISTRY.get(name, params)
    bits = getattr(quant, "bits", None)
    if not isinstance(quant, CodedQuantizer) or bits is None or name in ("kvquant", "skvq"):
        return  # outliers are levels of their own, reordered channels share no slice; the contract counts their codes
    x, most = tokens(quant, 2, dim=96), 2**bits
    if name == "rotated":
        from witcert_rotated import Rotated, random_signs, rotate

        assert isinstance(quant, Rotated)
        turned = rotate(run(quant, x) * random_signs(96, quant.seed))
        found = [len(row.mul(1e4).div(row.abs().max()).round().unique()) for row in turned.flatten(0, 1)]
    elif name == "kivi":
        from witcert_kivi import Kivi

        assert isinstance(quant, Kivi)
        found = [len(row.unique()) for row in run(quant, x).unflatten(0, (-1, 32)).transpose(1, -1).flatten(0, 2)]
        values = run(quant, x, "v").flatten(0, 1).split(quant.group_size, -1)
        found += [len(row.unique()) for part in values for row in part]
    else:
        groups = run(quant, x).flatten(0, 1).split(getattr(quant, "group_size", 96), -1)
        found, most = [len(row.unique()) for part in groups for row in part], min(2**bits, groups[0].shape[-1])
    assert max(found) <= 2**bits
    assert max(found) >= most - 1  # and they are used


# RoPE ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("mscale", [1.0, 1.2079])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (96, 32)])
def test_a_witness_before_rope_is_the_one_after_it(
    interleaved: bool, mscale: float, head_dim: int, rotary_dim: int
) -> None:
    """With one pair per band the norms before RoPE, times mscale, are those after it, up to a turn's rounding."""
    spec = RotarySpec(head_dim, rotary_dim, interleaved)
    table = rotary_table(mscale, spec, 4096)
    quant = REGISTRY.get("kvquant", {"bits": 3})
    bands = band_map(spec, num_bands=spec.n_pairs)
    exact = table.rotate(tokens(quant, 8, dim=head_dim), torch.arange(8) + 128)
    stored = run(quant, exact, spec=spec, table=table)
    positions = torch.arange(8) + 128
    before = bands.norms(table.unrotate(stored, positions).double() - table.unrotate(exact, positions).double())
    scaled = before.clone()
    scaled[..., : spec.n_pairs] *= table.mscale(positions)[:, None].double()
    after = bands.norms(stored.double() - exact.double())
    slack = 8 * 2.0**-23 * bands.norms(exact)  # two turns and their difference in float32
    assert ((scaled - after).abs() <= slack).all()
    assert after.max() > 1e3 * slack.max()
    # The wrong pairing is told apart: its bands mix channels that RoPE turns differently.
    other = band_map(RotarySpec(head_dim, rotary_dim, not interleaved), num_bands=spec.n_pairs)
    mixed = other.norms(table.unrotate(stored, positions).double() - table.unrotate(exact, positions).double())
    mixed[..., : spec.n_pairs] *= mscale
    assert ((mixed - other.norms(stored.double() - exact.double())).abs() > 100 * slack.max()).any()


def test_the_table_is_the_rotation_of_the_models() -> None:
    """Against their formula, in float64; and back, whatever the table's own rounding and factor."""
    for spec in (RotarySpec(64), RotarySpec(64, interleaved=True), RotarySpec(96, 32), RotarySpec(64, 0)):
        x = torch.randn(7, 3, spec.head_dim, generator=torch.Generator().manual_seed(1))
        positions = torch.tensor([0, 1, 2, 50, 300, 500, 511])
        table = rotary_table(spec=spec)
        assert torch.allclose(table.rotate(x, positions), rotate(spec, x.double(), positions).float(), atol=1e-4)
        rounded = RotaryTable(spec, (1.3 * table.cos_sin).to(torch.bfloat16))
        assert torch.allclose(rounded.unrotate(rounded.rotate(x, positions), positions), x, atol=1e-5)


@pytest.mark.parametrize("name", sorted(n for n in REGISTRY.names() if REGISTRY.cls(n).space == "pre_rope"))
def test_before_rope_the_error_does_not_depend_on_the_position(name: str) -> None:
    """The same keys further on: turned, the quantizer sees the same and stores the same, up to the turn's rounding."""
    quant, spec = REGISTRY.get(name), RotarySpec(64)
    before = tokens(quant, 4)
    tables = [rotary_table(spec=spec, positions=4096) for _ in range(2)]
    tables[1] = RotaryTable(spec, tables[1].cos_sin.roll(-1000, 0))
    here, there = (run(quant, table.rotate(before, torch.arange(4) + 128), table=table) for table in tables)
    back = [t.unrotate(x, torch.arange(4) + 128) for t, x in zip(tables, (here, there), strict=True)]
    assert ((back[0] - back[1]).abs() > 1e-3).float().mean() < 0.02  # a value on an edge may fall to the other side
    assert (here - there).abs().max() > 0.5


# Packaging -----------------------------------------------------------------------------------------------------------

DISTRIBUTIONS = sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))


@pytest.mark.parametrize("folder", DISTRIBUTIONS, ids=lambda path: path.name)
def test_a_plugin_is_a_distribution_of_its_own(folder: Path) -> None:
    """Installed, found by its entry point, bound to the versions of the core it was written for, and documented."""
    package = f"witcert_{folder.name}"
    distribution = package.replace("_", "-")
    assert f"{package}" in {entry.value for entry in entry_points(group="witcert.plugins")}
    (core,) = (r for r in map(Requirement, requires(distribution) or []) if r.name == "witcert")
    assert core.specifier.contains(version("witcert"))
    assert not core.specifier.contains("1.0")
    (name,) = REGISTRY.from_package(package)
    assert REGISTRY.source(name) == f"{distribution} {version(distribution)}"
    text = (folder / package / "__init__.py").read_text(encoding="utf-8")
    assert re.search(r"arXiv:\d{4}\.\d{5}", text)
    assert "section" in text.split('"""')[1]
    assert f"`{name}`" in (ROOT / "plugins" / "README.md").read_text(encoding="utf-8")
    own_tests = list((folder / "tests").glob("test_*.py"))
    assert own_tests
