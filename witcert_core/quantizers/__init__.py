"""Quantizers: what they are, which exist, and how a plain function becomes one."""

from witcert_core.quantizers.base import (
    CalibratedQuantizer,
    DitheredQuantizer,
    Encoded,
    QuantContext,
    Quantizer,
)
from witcert_core.quantizers.cast import Float8E4M3Cast, Float8E5M2Cast, NoQuantizer
from witcert_core.quantizers.coded import CodedQuantizer
from witcert_core.quantizers.engine import EnginePrecision
from witcert_core.quantizers.function import quantizer
from witcert_core.quantizers.int8_dither import Int8Dither, Int8DitherBypass, Int8DitherWitness
from witcert_core.quantizers.packing import Part
from witcert_core.quantizers.registry import REGISTRY, QuantizerRegistry
from witcert_core.quantizers.token_group import Int2TokenGroup, Int4TokenGroup, Int8TokenGroup

for _builtin in (
    NoQuantizer,
    EnginePrecision,
    Float8E4M3Cast,
    Float8E5M2Cast,
    Int8TokenGroup,
    Int4TokenGroup,
    Int2TokenGroup,
    Int8Dither,
    Int8DitherWitness,
    Int8DitherBypass,
):
    REGISTRY.register(_builtin)

__all__ = [
    "REGISTRY",
    "CalibratedQuantizer",
    "CodedQuantizer",
    "DitheredQuantizer",
    "Encoded",
    "Part",
    "QuantContext",
    "Quantizer",
    "QuantizerRegistry",
    "quantizer",
]
