"""How many tokens fit: a model's `config.json`, a layout and an amount of memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from witcert_core.cache.capacity import PASS_ID_BYTES, coded_bytes, side_bytes_per_head
from witcert_core.cache.schedule import QuantizeSchedule
from witcert_core.errors import InputError, UnsupportedError, did_you_mean, listed
from witcert_core.evaluate.settings import parse_quantizer
from witcert_core.policy.plugins import quantizer_registry
from witcert_core.quantizers.base import DitheredQuantizer, Quantizer
from witcert_core.quantizers.layout import KVLayout
from witcert_core.serving.models.attention import ModelAttention, describe
from witcert_core.serving.models.files import CONFIG, read_config

OF_LATENTS = ("fp16", "fp8", "int8_dither", "int8_dither_w")
"""Of a latent cache, whose rows keep no outliers apart, and the codes of no other quantizer."""
DEFAULT_LAYOUTS = (
    *OF_LATENTS,
    "bypass:4",
    "packed:int4_token_group",
    "packed:k=int8_token_group,v=int4_token_group",
)
_PLAIN = {"fp16": "none", "fp8": "fp8_e4m3_cast"}
LAYOUTS = (*_PLAIN, "int8_dither", "int8_dither_w")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class Capacity:
    """Tokens of one rank's share of the cache. ratio: against a 16-bit cache in the same memory."""

    layout: str
    bytes_per_token: int
    tokens: int
    ratio: float


def read_shape(path: Path) -> ModelAttention:
    """The attention in a `config.json`, or in a directory that holds one.

    A kind of model that Transformers knows is read as its configuration class understands the file; where Transformers
    is not installed, or does not know it, by the names in the file.

    Raises:
        InputError: no such file, not JSON, or a size is missing or impossible.
        UnsupportedError: a cache of something else than keys and values per head, or one that is not understood.
    """
    file = path / CONFIG if path.is_dir() else path
    return describe(read_config(file), str(file))


def parse_memory(text: str) -> int:
    """Bytes in '40GB' (10^9), '40GiB' (2^30), '512MiB' or '1000000'."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper() if match else ""
    if match is None or (unit and unit not in _UNITS):
        raise InputError(f"memory is {text!r}; write a number with B, KB, MB, GB, TB (powers of 1000) or KiB ... TiB")
    size = float(match[1]) * _UNITS.get(unit, 1)
    if size >= 2**63:
        raise InputError(f"memory is {match[1][:20]}... {unit}; less than 2^63 bytes is expected")
    return int(size)


def bytes_per_token(layout: str, shape: ModelAttention, tensor_parallel: int = 1) -> int:
    """Bytes of a token on one rank, all layers.

    layout: `fp16`, `fp8`; the packed `int8_dither`, `int8_dither_w` and `bypass:M` (M channel pairs of K in 16 bit),
    each with the slot's pass id; or `metered:QUANTIZER`, `metered:QUANTIZER@BITS`: a 16-bit pool in which that
    quantizer is simulated, with all that the meter keeps beside it, sketches of so many bits included; or
    `packed:QUANTIZER`, `packed:QUANTIZER@BITS`: the codes of that quantizer with the same beside them.
    """
    name, _, argument = layout.partition(":")
    if layout in _PLAIN:
        quantizer = quantizer_registry().get(_PLAIN[layout])

        def plain(k: int, v: int) -> int:
            return _plain_bytes(quantizer, k, 0 if shape.latent_dim else v)  # values of latents are read out of keys

        return _over_layers(shape, tensor_parallel, plain)
    if layout in ("int8_dither", "int8_dither_w") or (name == "bypass" and argument.isdecimal()):
        if shape.latent_dim and name == "bypass":
            raise UnsupportedError(f"layout {layout}: outliers are kept of keys of heads, not of latents (MLA)")

        def packed(k: int, v: int) -> int:
            pairs = int(argument or 0)
            own, witness = bool(shape.latent_dim), layout == "int8_dither_w"
            found = KVLayout(k, None if own else v, bypass_pairs=pairs, stored_witness=witness, values_in_keys=own)
            return found.bytes_per_token_head

        return _over_layers(shape, tensor_parallel, packed) + PASS_ID_BYTES
    if name in ("metered", "packed") and argument:
        spec = parse_quantizer(argument)
        quantizer, bits = spec.quantizer, spec.sketch_bits or 0
        if name == "packed" and isinstance(quantizer, DitheredQuantizer):
            raise InputError(f"layout is {layout!r}; write {spec.name} alone, or bypass:PAIRS")
        if name == "packed" and shape.latent_dim:
            raise UnsupportedError(f"layout {layout}: of latents (MLA) int8_dither alone has packed storage")
        if quantizer.bypass_pairs:
            raise InputError(f"layout is {layout!r}, but {spec.name} has packed storage only; write bypass:PAIRS")

        def side(k: int, v: int) -> int:
            return side_bytes_per_head(quantizer, shape.rotary(k), v, 2, bits)

        def coded(k: int, v: int) -> int:
            return sum(coded_bytes(quantizer, k, v))

        flag = 0 if QuantizeSchedule.of(quantizer).immediate else 1  # whether a token waits to be quantized
        if name == "packed":
            kept = _over_layers(shape, tensor_parallel, coded)
        else:
            kept = bytes_per_token("fp16", shape, tensor_parallel)
        return kept + _over_layers(shape, tensor_parallel, side) + PASS_ID_BYTES + flag
    raise InputError(
        f"layout is {layout!r}{did_you_mean(layout, LAYOUTS)}; allowed are {listed(LAYOUTS)}, bypass:PAIRS, "
        "metered:QUANTIZER and packed:QUANTIZER"
    )


def _over_layers(shape: ModelAttention, tensor_parallel: int, per_head: Callable[[int, int], int]) -> int:
    """Bytes of a token on one rank, in all layers; per_head(head_dim, v_head_dim): those of one KV head."""
    return sum(
        layers * heads_of_a_rank(heads, tensor_parallel) * per_head(k, v)
        for (heads, k, v), layers in shape.shapes.items()
    )


def heads_of_a_rank(heads: int, tensor_parallel: int) -> int:
    """KV heads of one rank; where there are fewer heads than ranks, engines give neighbours the same one."""
    if tensor_parallel < 1:
        raise InputError(f"tensor parallelism is {tensor_parallel}; it must be at least 1")
    small, large = sorted((heads, tensor_parallel))
    if large % small:
        raise InputError(f"{heads} KV heads do not divide over {tensor_parallel} ranks; one must divide the other")
    return max(1, heads // tensor_parallel)


def _plain_bytes(quantizer: Quantizer, head_dim: int, v_head_dim: int) -> int:
    """K and V may differ in width: each takes half of what the quantizer says for both at its own width."""
    sizes = [quantizer.bytes_per_token_head(width) if width else 0 for width in (head_dim, v_head_dim)]
    if sizes[0] is None or sizes[1] is None:
        raise InputError(f"quantizer {quantizer.name!r} does not declare its bytes")
    return int((sizes[0] + sizes[1]) / 2)


def capacity(layout: str, shape: ModelAttention, memory: int, tensor_parallel: int = 1) -> Capacity:
    """Tokens that `memory` bytes of one rank hold in `layout`."""
    size = bytes_per_token(layout, shape, tensor_parallel)
    plain = bytes_per_token("fp16", shape, tensor_parallel)
    return Capacity(layout, size, memory // size, plain / size)
