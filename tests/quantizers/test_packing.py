"""Quantizers that can be stored: bytes of their parts and back, their layout, and what breaks the promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from witcert_core import CodedQuantizer, Part, Quantizer, QuantizerError, quantizer
from witcert_core.policy.plugins import quantizer_registry
from witcert_core.quantizers import QuantizerRegistry
from witcert_core.quantizers.coded import token_layout, why_not_packed
from witcert_core.quantizers.conformance import check_quantizer
from witcert_core.quantizers.packing import TokenLayout, pack_bits, unpack_bits

STORED = ("fp8_e4m3_cast", "fp8_e5m2_cast", "int8_token_group", "int4_token_group", "int2_token_group")


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 24, 32])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 20, 129])
def test_codes_of_any_width_come_back(bits: int, count: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 2, count), generator=torch.Generator().manual_seed(bits))
    packed = pack_bits(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 2, -(-count * bits // 8))
    assert torch.equal(unpack_bits(packed, bits, count).long(), codes)


def test_the_first_code_is_in_the_low_bits() -> None:
    assert pack_bits(torch.tensor([1, 2, 3]), 4).tolist() == [0x21, 0x03]
    assert pack_bits(torch.tensor([1, 2, 3]), 3).tolist() == [1 + 2 * 8 + (3 * 64) % 256, 0]
    assert pack_bits(torch.tensor([0x1234]), 16).tolist() == [0x34, 0x12]


@pytest.mark.parametrize("bits", [0, 9, 33, -4])
def test_widths_that_do_not_end_with_a_byte_are_named(bits: int) -> None:
    with pytest.raises(QuantizerError, match=f"codes of {bits} bits cannot be packed; allowed are 1 to 8"):
        pack_bits(torch.zeros(4), bits)


def test_parts_of_every_dtype_come_back_as_they_were() -> None:
    generator = torch.Generator().manual_seed(1)
    parts = {
        "flag": Part(torch.randint(0, 2, (5, 2, 9), generator=generator).bool(), 1),
        "small": Part(torch.randn(5, 2, 3, generator=generator).to(torch.float8_e4m3fn), 8),
        "scale": Part(torch.randn(5, 2, generator=generator).half(), 16),
        "codes": Part(torch.randint(0, 8, (5, 2, 3, 5), generator=generator).int(), 3),
        "wide": Part(torch.randn(5, 2, 1, generator=generator), 32),
    }
    layout = TokenLayout.of(parts)
    packed = layout.pack(parts)
    assert layout.nbytes == packed.shape[-1] == 2 + 3 + 2 + 6 + 4
    assert packed.numel() == sum(part.nbytes for part in parts.values())
    read = layout.unpack(packed[[4, 1]])
    for name, part in parts.items():
        assert read[name].values.dtype == part.values.dtype
        assert read[name].bits == part.bits
        assert torch.equal(read[name].values.double(), part.values[[4, 1]].double())
    assert torch.equal(layout.unpack(packed[2:3, :1])["scale"].values, parts["scale"].values[2:3, :1])
    assert layout.unpack(packed[:0])["codes"].values.shape == (0, 2, 3, 5)


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("head_dim", [64, 80, 33, 128])
def test_what_is_built_in_takes_the_bytes_it_declares(name: str, head_dim: int) -> None:
    quant = quantizer_registry().get(name)
    assert isinstance(quant, CodedQuantizer)
    assert why_not_packed(quant) is None
    assert sum(token_layout(quant, kind, head_dim).nbytes for kind in ("k", "v")) == quant.bytes_per_token_head(
        head_dim
    )


@dataclass(frozen=True)
class Pairs(CodedQuantizer):
    """A sign a channel, right as it stands; what it says it keeps may be changed."""

    name: ClassVar[str] = "pairs"

    def encode(self, x: Tensor, **_: Any) -> dict[str, Part]:
        return {"sign": Part((x < 0).to(torch.uint8), 1), "size": Part(x.abs().amax(-1).clamp(max=65504).half(), 16)}

    def decode(self, parts: Mapping[str, Part], **_: Any) -> Tensor:
        return parts["size"].values.float()[..., None] * (1 - 2.0 * parts["sign"].values)


def with_neighbours(self: Pairs, x: Tensor, **rest: Any) -> dict[str, Part]:
    """A counter that decode ignores: values are right, bytes are not the token's own."""
    return Pairs.encode(self, x, **rest) | {"count": Part(torch.arange(len(x)).expand(x.shape[1], -1).T, 8)}


def with_more_for_some(self: Pairs, x: Tensor, **rest: Any) -> dict[str, Part]:
    spare = int(bool((x > 30).any()))
    return Pairs.encode(self, x, **rest) | {"outliers": Part(torch.zeros(*x.shape[:2], spare).half(), 16)}


def by_position(self: Pairs, parts: Mapping[str, Part], *, positions: Tensor, **rest: Any) -> Tensor:
    return Pairs.decode(self, parts, **rest) * (1 + (positions > 0))[:, None, None]


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({"encode": with_neighbours}, "the codes of a token depend on the others of its batch"),
        ({"encode": with_more_for_some}, r"its parts are .* here and were .* what is stored of a token must have one"),
        ({"decode": by_position}, "what is read back of its bytes is not what fake_quantize gives"),
        ({"bytes_per_token_head": lambda self, head_dim: 2.0}, "is 2.0; its codes take 36"),
    ],
)
def test_a_quantizer_that_cannot_be_stored_as_it_says_is_found(changes: dict[str, Any], broken: str) -> None:
    check_quantizer(Pairs())
    made: type[Quantizer] = type("Changed", (Pairs,), changes)
    with pytest.raises(QuantizerError, match=broken):
        check_quantizer(dataclass(frozen=True)(made)())


@pytest.mark.parametrize(
    ("quant", "why"),
    [
        (quantizer_registry().get("none"), "has no encode and decode"),
        (type("Together", (Pairs,), {"token_group": 2})(), "stores 2 tokens together"),
        (type("PreRope", (Pairs,), {"space": "pre_rope"})(), "takes keys before RoPE"),
        (type("Sinks", (Pairs,), {"sink_tokens": 4})(), "the first tokens of a request exact"),
        (type("State", (Pairs,), {"state": "request"})(), "calibrates on each request"),
    ],
)
def test_why_a_quantizer_cannot_be_stored(quant: Quantizer, why: str) -> None:
    found = why_not_packed(quant)
    assert found is not None
    assert why in found


def test_groups_and_states_have_to_declare_their_bytes() -> None:
    made = type("Together", (Pairs,), {"token_group": 2})()
    with pytest.raises(QuantizerError, match="'pairs' does not declare its bytes"):
        made.bytes_per_token_head(64)


# The decorator ----------------------------------------------------------------------------------------------------


def shifted(parts: Mapping[str, Part], *, kind: str, step: float) -> Tensor:
    return (parts["codes"].values.float() - 8) * step if kind == "k" else parts["codes"].values.float() - 8


def steps(x: Tensor, *, kind: str, step: float = 0.5) -> dict[str, Part]:
    codes = (x / (step if kind == "k" else 1.0)).round().clamp(-8, 7).nan_to_num(0) + 8
    return {"codes": Part(codes.byte(), 4)}


def test_a_function_with_its_decoder_is_a_coded_quantizer() -> None:
    registry = QuantizerRegistry()
    quantizer("steps", decode=shifted, registry=registry)(steps)
    quant = registry.get("steps", {"step": 0.25})
    check_quantizer(quant, 80)
    assert why_not_packed(quant) is None
    assert quant.bytes_per_token_head(80) == 80


def test_what_is_wrong_with_a_function_and_its_decoder_is_named() -> None:
    registry = QuantizerRegistry()
    with pytest.raises(QuantizerError, match="its bytes are those of the parts it returns; leave bytes out"):
        quantizer("bad", decode=shifted, bytes=3.0, registry=registry)
    with pytest.raises(QuantizerError, match="decode takes step; it may take parameters of"):
        quantizer("bad", decode=shifted, registry=registry)(lambda x: {})
    quantizer("tensor", decode=lambda parts: parts, registry=registry)(lambda x: x)
    with pytest.raises(QuantizerError, match=r"must return a dict of witcert_core.Part, not Tensor"):
        check_quantizer(registry.get("tensor"))
