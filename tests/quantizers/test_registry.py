"""The built-in quantizers, and that every broken promise of any quantizer is found.

The matrix that installed plugins join by themselves is in tests/plugins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from witcert_core import (
    CalibratedQuantizer,
    CodedQuantizer,
    Part,
    QuantContext,
    Quantizer,
    QuantizerError,
    RotarySpec,
    quantizer,
)
from witcert_core.cache.bands import band_map
from witcert_core.cache.norm_codes import decode_norm, value_codes, witness_codes
from witcert_core.policy.plugins import quantizer_registry
from witcert_core.quantizers import QuantizerRegistry
from witcert_core.quantizers.apply import fake_quantize
from witcert_core.quantizers.base import Kind, check_kinds_alike
from witcert_core.quantizers.conformance import check_quantizer
from witcert_core.quantizers.dither import DitherKey
from witcert_core.quantizers.int8_dither import Int8Dither

REGISTRY = quantizer_registry()
NAMES = sorted(REGISTRY.from_package("witcert_core"))
HEAD_DIMS = (64, 80, 96, 128, 256)


def context(heads: tuple[int, ...] = (0, 1), head_dim: int = 64, rows: int = 4) -> QuantContext:
    return QuantContext(
        heads, head_dim, RotarySpec(head_dim), torch.bfloat16, torch.arange(1, rows + 1), DitherKey(1, 2)
    )


def run(quant: Quantizer, x: Tensor, kind: str = "k") -> Tensor:
    ctx = context(tuple(range(x.shape[1])), x.shape[2], x.shape[0])
    positions = torch.arange(x.shape[0])
    return quant.fake_quantize(x, kind=kind, layer=0, positions=positions, ctx=ctx)  # type: ignore[arg-type]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", NAMES)
def test_contract(name: str, head_dim: int) -> None:
    check_quantizer(REGISTRY.get(name), head_dim)


@pytest.mark.parametrize("name", NAMES)
def test_nonfinite_input_leaves_no_bound(name: str) -> None:
    """Whatever is stored for NaN or Inf, the witness of its token and head is infinite, others finite."""
    bands = band_map(RotarySpec(64))
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(0))
        x[2, 1, 7] = bad
        norms = decode_norm(witness_codes(x, run(REGISTRY.get(name), x), bands)).sum(-1)
        values = decode_norm(value_codes(x, run(REGISTRY.get(name), x, "v")))
        for bound in (norms, values):
            assert bound[2, 1].isinf()
            assert bound.isfinite().sum() == 7


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("none", (256, 320, 384, 512, 1024)),
        ("fp8_e4m3_cast", (128, 160, 192, 256, 512)),
        ("fp8_e5m2_cast", (128, 160, 192, 256, 512)),
        ("int8_token_group", (144, 184, 216, 288, 576)),
        ("int4_token_group", (80, 104, 120, 160, 320)),
        ("int2_token_group", (48, 64, 72, 96, 192)),
        ("int8_dither", (136, 172, 204, 272, 544)),
        ("int8_dither_w", (138, 175, 207, 276, 552)),
    ],
)
def test_declared_bytes(name: str, sizes: tuple[int, ...]) -> None:
    assert tuple(REGISTRY.get(name).bytes_per_token_head(d) for d in HEAD_DIMS) == sizes


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("fp8_e4m3_cast", [1.0, 1.0625, 1.1875, 447.0, 500.0, -1e9], [1.0, 1.0, 1.25, 448.0, 448.0, -448.0]),
        ("fp8_e5m2_cast", [1.0, 1.125, 1.375, 5e4, 6e4, -1e9], [1.0, 1.0, 1.5, 49152.0, 57344.0, -57344.0]),
        ("int8_token_group", [0.0, 0.5, 1.25, 254.75, 255.0, 3.0], [0.0, 0.0, 1.0, 255.0, 255.0, 3.0]),
        ("int4_token_group", [-1.0, 0.25, 1.5, 14.0, 6.6, 2.9], [-1.0, 0.0, 1.0, 14.0, 7.0, 3.0]),
        ("int2_token_group", [-3.0, 0.0, 0.9, 1.9, 2.1, 3.0], [-3.0, 1.0, 1.0, 1.0, 3.0, 3.0]),
    ],
)
def test_values(name: str, given: list[float], expected: list[float]) -> None:
    """By hand: ties to even, saturation, and min/max groups with an exact fp16 scale (1, 1, 1 and 2)."""
    x = torch.tensor(given + [given[0]] * 26).reshape(1, 1, 32)
    assert run(REGISTRY.get(name), x)[0, 0, :6].tolist() == expected


def test_groups_do_not_touch_each_other_and_the_short_one_is_its_own() -> None:
    x = torch.randn(1, 1, 80, generator=torch.Generator().manual_seed(3))
    changed = x.clone()
    changed[..., 64:] *= 100
    before, after = (run(REGISTRY.get("int4_token_group"), t) for t in (x, changed))
    assert torch.equal(before[..., :64], after[..., :64])
    # fp16 keeps the short group's own minimum to 11 bits; a zero as padding would be the minimum of 5 + x.
    shifted = run(REGISTRY.get("int8_token_group"), 5 + x)[..., 64:]
    spread = float((5 + x)[..., 64:].max() - (5 + x)[..., 64:].min())
    assert (shifted - (5 + x)[..., 64:]).abs().max() <= spread / 255 / 2 + 5 * 2**-10


def test_dither_differs_between_rows_layers_and_heads() -> None:
    x = torch.full((2, 2, 64), 0.3)
    x[..., 0] = 1.0
    quant = REGISTRY.get("int8_dither")
    here = run(quant, x)
    other_layer = quant.fake_quantize(x, kind="k", layer=1, positions=torch.arange(2), ctx=context(rows=2))
    assert not torch.equal(here, other_layer)
    assert not torch.equal(here[0, 0], here[0, 1])
    assert not torch.equal(here[0, 0], here[1, 0])


def test_dither_without_its_row_is_refused() -> None:
    ctx = QuantContext((0,), 64, RotarySpec(64), torch.bfloat16)
    with pytest.raises(QuantizerError, match="no pass_ids or no dither_key"):
        REGISTRY.get("int8_dither").fake_quantize(
            torch.zeros(1, 1, 64), kind="k", layer=0, positions=torch.zeros(1, dtype=torch.int64), ctx=ctx
        )


@pytest.mark.parametrize(
    ("x", "kind", "message"),
    [
        (torch.zeros(2, 2, 32), "k", r"x has shape \(2, 2, 32\); expected \[N, 2, 64\]"),
        (torch.zeros(2, 2, 64, dtype=torch.float16), "k", "x is torch.float16; expected torch.float32"),
        (torch.zeros(2, 2, 64), "key", "kind is 'key'; allowed: 'k', 'v'"),
        (torch.zeros(3, 2, 64), "v", r"positions has shape \(2,\); expected \[3\]"),
    ],
)
def test_wrong_input_is_named(x: Tensor, kind: str, message: str) -> None:
    with pytest.raises(QuantizerError, match=message):
        REGISTRY.get("fp8_e4m3_cast").fake_quantize(
            x,
            kind=kind,  # type: ignore[arg-type]
            layer=0,
            positions=torch.arange(2),
            ctx=context(),
        )


def test_decorated_function_gets_what_it_asks_for() -> None:
    registry = QuantizerRegistry()

    @quantizer("keys_only", bytes=7, registry=registry)
    def keys_only(x: Tensor, *, kind: str, layer: int, factor: float = 0.5) -> Tensor:
        return x * factor + layer if kind == "k" else x + 0.0

    assert keys_only(torch.ones(1), kind="k", layer=0).item() == 0.5  # the function itself is left as it is
    quant = registry.get("keys_only", {"factor": 0.25})
    assert (run(quant, torch.ones(1, 1, 64), "k") == 0.25).all()
    assert (run(quant, torch.ones(1, 1, 64), "v") == 1).all()
    assert quant.bytes_per_token_head(64) == 7
    with pytest.raises(FrozenInstanceError):
        quant.factor = 1.0  # type: ignore[attr-defined]
    check_quantizer(quant)


def per_batch(x: Tensor) -> Tensor:
    return (100 * x / x.abs().amax()).round()


def per_token(x: Tensor) -> Tensor:
    return x / x.nan_to_num(0, 0, 0).abs().amax(dim=(1, 2), keepdim=True).clamp(min=1)


CALLS = [0]


def counting(x: Tensor) -> Tensor:
    CALLS[0] += 1
    return x + CALLS[0]


@pytest.mark.parametrize(
    ("function", "broken"),
    [
        (per_batch, "a token depends on the others of its batch"),
        (per_token, "a head depends on the others"),
        (counting, "another result the second time"),
        (lambda x: x.to(torch.bfloat16), "the result is torch.bfloat16"),
        (lambda x: (x * 2)[..., :1], "the result has shape"),
        (lambda x: (x * 1e38 * 10).clone(), "finite input .* gave NaN or Inf"),
        (lambda x: x + torch.arange(len(x))[:, None, None], "a token depends on"),
        (lambda x: x + x.isnan().any(), "nan in one token changes another"),
        (lambda x: x.clone() if len(x) else x[0], "IndexError"),
    ],
)
def test_each_broken_promise_is_found(function: object, broken: str) -> None:
    registry = QuantizerRegistry()
    quantizer("broken", registry=registry)(function)  # type: ignore[type-var]
    with pytest.raises(QuantizerError, match=f"quantizer 'broken', head_dim 128, kind 'k': .*{broken}"):
        check_quantizer(registry.get("broken"))


@pytest.mark.parametrize(
    ("declared", "broken"),
    [
        (lambda head_dim: 1 / 0, r"bytes_per_token_head\(128\) raised ZeroDivisionError"),
        (lambda head_dim: "few", r"bytes_per_token_head\(128\) is 'few'; expected None or more than 0"),
        (-3, r"bytes_per_token_head\(128\) is -3"),
    ],
)
def test_bytes_that_are_none_are_named(declared: Any, broken: str) -> None:
    registry = QuantizerRegistry()
    quantizer("sized", bytes=declared, registry=registry)(lambda x: x / 2)
    with pytest.raises(QuantizerError, match=broken):
        check_quantizer(registry.get("sized"))


def test_a_decorator_without_its_name_is_refused() -> None:
    with pytest.raises(QuantizerError, match=r"quantizer name is <function .*; expected text: @witcert_core.quantizer"):

        @quantizer  # type: ignore[arg-type]
        def halves(x: Tensor) -> Tensor:
            return x / 2

    with pytest.raises(QuantizerError, match="bytes is 'lots'; expected a number or a function of head_dim"):
        quantizer("sized", bytes="lots")  # type: ignore[arg-type]


@pytest.mark.parametrize("thing", ["int8_dither", Quantizer, None], ids=str)
def test_what_is_no_quantizer_is_named(thing: Any) -> None:
    with pytest.raises(QuantizerError, match="is no quantizer; expected an instance of a class of Quantizer"):
        check_quantizer(thing)


def test_a_function_may_write_to_its_argument() -> None:
    registry = QuantizerRegistry()

    @quantizer("in_place", registry=registry)
    def in_place(x: Tensor) -> Tensor:
        return x.mul_(2)

    x = torch.ones(1, 1, 64)
    assert (run(registry.get("in_place"), x) == 2).all()
    assert (x == 1).all()
    check_quantizer(registry.get("in_place"))


@dataclass(frozen=True)
class Good(Quantizer):
    name: ClassVar[str] = "good"
    bits: int = 4

    def fake_quantize(self, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext) -> Tensor:
        return x.clone()


def variant(**changes: object) -> type[Quantizer]:
    return dataclass(frozen=True)(type("Variant", (Good,), changes))


@pytest.mark.parametrize(
    ("method", "broken"),
    [
        (lambda self, x, *, kind, layer, positions, ctx: x.mul_(2), "the input was written to"),
        (lambda self, x, *, kind, layer, positions, ctx: x, "shares memory with the input"),
        (lambda self, x, *, kind, layer, positions: x.clone(), "TypeError: .*ctx"),
    ],
)
def test_each_promise_broken_by_a_class_is_found(method: object, broken: str) -> None:
    with pytest.raises(QuantizerError, match=broken):
        check_quantizer(variant(fake_quantize=method)())


def test_values_that_are_quantized_unlike_keys_are_not_alike() -> None:
    def by_kind(self: Quantizer, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext) -> Tensor:
        return x * (0.5 if kind == "k" else 0.25)

    check_quantizer(variant(fake_quantize=by_kind)())
    with pytest.raises(QuantizerError, match="values are quantized unlike keys"):
        check_quantizer(variant(fake_quantize=by_kind, kinds_alike=True)())


@pytest.mark.parametrize("flag", [{"space": "pre_rope"}, {"token_group": 2}, {"recent_tokens": 8}])
def test_quantizers_that_need_to_know_keys_from_values_are_not_alike(flag: dict[str, object]) -> None:
    with pytest.raises(QuantizerError, match="kinds_alike needs"):
        check_kinds_alike(variant(kinds_alike=True, **flag)())


@dataclass(frozen=True)
class Nibbles(CodedQuantizer):
    """Two tokens share a scale; coded in 4 bits, and right as it stands."""

    name: ClassVar[str] = "nibbles"
    token_group: ClassVar[int] = 2

    def encode(self, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext) -> dict[str, Part]:
        pairs = x.unflatten(0, (-1, 2))
        scale = (pairs.abs().amax((1, 3)) / 7).clamp(max=6e4).half()
        step = torch.where(scale == 0, 1.0, scale.float()).repeat_interleave(2, 0)[..., None]
        codes = (x / step).round().clamp(-7, 7).nan_to_num(0) + 7
        return {"codes": Part(codes.to(torch.uint8), 4), "scale": Part(scale, 16)}

    def decode(
        self, parts: Mapping[str, Part], *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext
    ) -> Tensor:
        scale = parts["scale"].values.float().repeat_interleave(2, 0)[..., None]
        return (parts["codes"].values.float() - 7) * scale

    def bytes_per_token_head(self, head_dim: int) -> float:
        return 2.0 * (-(-head_dim // 2) + 1)


@dataclass(frozen=True)
class Scaled(CalibratedQuantizer):
    """int8 by the largest magnitude of the first tokens, and right as it stands."""

    name: ClassVar[str] = "scaled"
    calibration_tokens: int = 6

    def calibrate(self, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext) -> Tensor:
        return x.abs().amax((0, 2))[:, None].clamp(min=1e-20) / 127

    def fake_quantize(self, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext) -> Tensor:
        assert ctx.state is not None
        return (x / ctx.state).round().clamp(-127, 127) * ctx.state


def changed(base: type[Quantizer], **changes: object) -> Quantizer:
    made: type[Quantizer] = type("Changed", (base,), changes)
    return dataclass(frozen=True)(made)()


@pytest.mark.parametrize("base", [Nibbles, Scaled])
@pytest.mark.parametrize("head_dim", [16, 34, 128])
def test_coded_and_calibrated_quantizers_that_keep_their_promises(base: type[Quantizer], head_dim: int) -> None:
    check_quantizer(base(), head_dim)


def wide(self: Nibbles, x: Tensor, **rest: Any) -> dict[str, Part]:
    return Nibbles.encode(self, x, **rest) | {"codes": Part(torch.full(x.shape, 16, dtype=torch.uint8), 4)}


def single(self: Nibbles, x: Tensor, **rest: Any) -> dict[str, Part]:
    parts = Nibbles.encode(self, x, **rest)
    return parts | {"scale": Part(parts["scale"].values.float(), 16)}


def rows_of_a_third(self: Nibbles, x: Tensor, **rest: Any) -> dict[str, Part]:
    return Nibbles.encode(self, x, **rest) | {"more": Part(torch.zeros(len(x) + 1, 3), 32)}


@pytest.mark.parametrize(
    ("base", "changes", "broken"),
    [
        (Nibbles, {"encode": wide}, "'codes' has integers that do not fit 4 bits"),
        (Nibbles, {"encode": single}, "'scale' is torch.float32 in 16 bits"),
        (Nibbles, {"encode": rows_of_a_third}, r"'more' has shape \(11, 3\), not \[10 or 5, 3"),
        (Nibbles, {"bytes_per_token_head": lambda self, head_dim: 100.0}, "is 100.0; its codes take 130"),
        (Nibbles, {"fake_quantize": lambda self, x, **_: x.clone()}, "fake_quantize is not decode"),
        (Scaled, {"calibrate": lambda self, x, **_: x.abs().amax().expand(x.shape[1], 1)}, "state of a head"),
        (Scaled, {"calibrate": lambda self, x, **_: x.double().amax((0, 2))[:, None]}, "calibrate gives torch.float64"),
        (Scaled, {"calibrate": lambda self, x, **_: 1 / x.abs().amax((0, 2))[:, None]}, "calibrates to NaN or Inf"),
        (Scaled, {"calibrate": lambda self, x, **_: x[99]}, "calibration failed: IndexError"),
    ],
)
def test_each_promise_broken_by_a_coded_or_calibrated_one_is_found(
    base: type[Quantizer], changes: dict[str, object], broken: str
) -> None:
    with pytest.raises(QuantizerError, match=broken):
        check_quantizer(changed(base, **changes))


class NotFrozen(Quantizer):
    name: ClassVar[str] = "not_frozen"

    def fake_quantize(self, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (int, "not a subclass"),
        (Quantizer, "does not define fake_quantize"),
        (NotFrozen, r"@dataclass\(frozen=True\)"),
        (variant(name="No Good"), "name is 'No Good'"),
        (variant(space="rope"), "space is 'rope'; allowed: post_rope, pre_rope"),
        (variant(state="batch"), "state is 'batch'"),
        (variant(tier="probabilistic"), "only a DitheredQuantizer"),
        (variant(state="request"), "a CalibratedQuantizer, which says"),
        (dataclass(frozen=True)(type("PreRope", (Int8Dither,), {"space": "pre_rope"})), "dither's law is known for"),
        (variant(token_group=0), "token_group is 0"),
    ],
)
def test_bad_records_are_refused_when_registered(record: type, message: str) -> None:
    with pytest.raises(QuantizerError, match=message):
        QuantizerRegistry().register(record)


def test_names_are_unique() -> None:
    registry = QuantizerRegistry()
    registry.register(Good)
    registry.register(Good)
    with pytest.raises(QuantizerError, match=r"name 'good' is taken: .*Good has it, .*Variant wants it"):
        registry.register(variant(name="good"))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"bit": 3}, r"unknown parameter 'bit' \(did you mean 'bits'\?\); allowed: bits"),
        ({"bits": "3"}, "parameter 'bits' is '3'; allowed: a valid integer"),
        ({"bits": True}, "parameter 'bits' is true"),
    ],
)
def test_bad_params_are_named(params: dict[str, object], message: str) -> None:
    registry = QuantizerRegistry()
    registry.register(Good)
    with pytest.raises(QuantizerError, match=message):
        registry.get("good", params)


def test_parameter_without_default_and_refused_by_the_quantizer() -> None:
    registry = QuantizerRegistry()

    @quantizer("needs", registry=registry)
    def needs(x: Tensor, *, step: float) -> Tensor:
        return x * step

    assert registry.required("needs") == registry.parameters("needs") == ("step",)
    with pytest.raises(QuantizerError, match="parameter 'step' is missing"):
        registry.get("needs")
    with pytest.raises(QuantizerError, match="group_size is 0; expected 1 to 65536"):
        REGISTRY.get("int4_token_group", {"group_size": 0})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: None, "exactly one positional argument"),
        (lambda x, y: x, "exactly one positional argument"),
        (lambda x, **rest: x, "exactly one positional argument"),
        (lambda x, *, bits=3: x, "parameter 'bits' needs a type annotation"),
        (lambda x, *, name="a": x, "a parameter cannot be called 'name'"),
        (lambda x, *, token_group=3: x, "a parameter cannot be called 'token_group'"),
    ],
)
def test_bad_functions_are_refused(function: object, message: str) -> None:
    with pytest.raises(QuantizerError, match=message):
        quantizer("bad", registry=QuantizerRegistry())(function)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: None, "returned NoneType for k in layer 3; it must return a torch.float32 tensor"),
        (lambda x: x.half(), "returned torch.float16 on cpu"),
        (lambda x: x.round().int(), "returned torch.int32 on cpu"),
        (lambda x: x.to("meta"), "returned torch.float32 on meta"),
        (lambda x: x[..., :3], r"returned \(2, 3, 3\) for k of shape \(2, 3, 8\)"),
        (lambda x: x.reshape(7), r"failed on k of shape \(2, 3, 8\) in layer 3: RuntimeError: shape"),
    ],
)
def test_what_a_server_gets_from_a_bad_quantizer_is_one_line(function: object, message: str) -> None:
    """Also without the conformance check: float16 would be measured before its last rounding."""
    registry = QuantizerRegistry()
    quantizer("bad", registry=registry)(function)  # type: ignore[type-var]
    ctx = QuantContext(head_ids=(0, 1, 2), head_dim=8, rotary=RotarySpec(8), storage_dtype=torch.float32)
    with pytest.raises(QuantizerError, match=f"quantizer 'bad' {message}") as raised:
        fake_quantize(registry.get("bad"), torch.ones(2, 3, 8), kind="k", layer=3, positions=torch.arange(2), ctx=ctx)
    assert "\n" not in str(raised.value)
