"""How many tokens fit: a model's `config.json`, a layout and an amount of memory."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from witcert_core.capacity import packed_bytes_per_token, side_bytes_per_head, side_bytes_per_token
from witcert_core.closing import ClosingRule
from witcert_core.errors import InputError, UnsupportedError
from witcert_core.evaluate.settings import parse_quantizer
from witcert_core.hooks import quantizer_registry
from witcert_core.layout import KVLayout
from witcert_core.quantizers.base import Quantizer
from witcert_core.rotary import RotarySpec
from witcert_core.suggest import did_you_mean, listed

MOST = 1_000_000
"""More layers, heads or channels than any model has: a larger number in a configuration is a mistake."""
DEFAULT_LAYOUTS = ("fp16", "fp8", "int8_dither", "int8_dither_w", "bypass:4")
_PLAIN = {"fp16": "none", "fp8": "fp8_e4m3_cast"}
LAYOUTS = (*_PLAIN, "int8_dither", "int8_dither_w")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_OTHER_LAYERS = {"linear_attention", "mamba", "conv", "recurrent"}


@dataclass(frozen=True)
class ModelShape:
    """What of a model's configuration decides the size of its cache; num_layers: those with a KV cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rotary_dim: int | None = None
    sliding_layers: int = 0

    def heads_of_a_rank(self, tensor_parallel: int) -> int:
        """KV heads of one rank; where there are fewer heads than ranks, engines give neighbours the same one."""
        if tensor_parallel < 1:
            raise InputError(f"tensor parallelism is {tensor_parallel}; it must be at least 1")
        small, large = sorted((self.num_kv_heads, tensor_parallel))
        if large % small:
            raise InputError(
                f"{self.num_kv_heads} KV heads do not divide over {tensor_parallel} ranks; one must divide the other"
            )
        return max(1, self.num_kv_heads // tensor_parallel)


@dataclass(frozen=True)
class Capacity:
    """Tokens of one rank's share of the cache. ratio: against a 16-bit cache in the same memory."""

    layout: str
    bytes_per_token: int
    tokens: int
    ratio: float


def read_shape(path: Path) -> ModelShape:
    """The shape in a `config.json`, or in a directory that holds one.

    Raises:
        InputError: no such file, not JSON, or a size is missing.
        UnsupportedError: multi-head latent attention, or a kind of layer whose cache is not known.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}; give a config.json or its directory") from error
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, or a number of thousands of digits
        raise InputError(f"{file}: is not JSON that can be read: {error}") from error
    text = settings.get("text_config", settings) if isinstance(settings, dict) else settings
    if not isinstance(text, dict):
        raise InputError(f"{file}: {type(text).__name__} is where a mapping is expected; is this a config.json?")
    return shape_of(text, str(file))


def shape_of(settings: Mapping[str, Any], origin: str) -> ModelShape:
    """The shape in a loaded configuration (of the text part, where a model has several)."""
    if settings.get("kv_lora_rank"):
        raise UnsupportedError(f"{origin}: multi-head latent attention caches a latent, not keys and values per head")

    def number(*names: str) -> int:
        for name in names:
            value = settings.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
                raise InputError(f"{origin}: {name} is {value!r}; expected an integer from 1 to {MOST}")
            return value
        raise InputError(f"{origin}: has no {' or '.join(names)}; is this a language model's configuration?")

    heads = number("num_attention_heads", "n_head")
    head_dim = number("head_dim") if settings.get("head_dim") else number("hidden_size", "n_embd") // heads
    kinds = settings.get("layer_types") or ["full_attention"] * number("num_hidden_layers", "n_layer")
    if not isinstance(kinds, (list, tuple)) or not all(isinstance(kind, str) for kind in kinds):
        raise InputError(f"{origin}: layer_types is {kinds!r}; expected a list of words")
    if odd := sorted(set(kinds) - _ATTENTION_LAYERS - _OTHER_LAYERS):
        raise UnsupportedError(f"{origin}: has layers of type {odd[0]!r}, whose cache this does not know")
    factor = settings.get("partial_rotary_factor")
    if factor is not None and not (isinstance(factor, (int, float)) and 0 <= factor <= 1):
        raise InputError(f"{origin}: partial_rotary_factor is {factor!r}; expected a number from 0 to 1")
    if not any(kind in _ATTENTION_LAYERS for kind in kinds):
        raise UnsupportedError(f"{origin}: has no layer with a cache of keys and values")
    return ModelShape(
        num_layers=sum(kind in _ATTENTION_LAYERS for kind in kinds),
        num_kv_heads=number("num_key_value_heads") if settings.get("num_key_value_heads") else heads,
        head_dim=head_dim,
        v_head_dim=number("v_head_dim") if settings.get("v_head_dim") else head_dim,
        rotary_dim=int(head_dim * factor) // 2 * 2 if factor is not None and factor < 1 else None,
        sliding_layers=sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds),
    )


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


def bytes_per_token(layout: str, shape: ModelShape, tensor_parallel: int = 1) -> int:
    """Bytes of a token on one rank, all layers.

    layout: `fp16`, `fp8`; the packed `int8_dither`, `int8_dither_w` and `bypass:M` (M channel pairs of K in 16 bit),
    each with the slot's row id; or `metered:QUANTIZER`, `metered:QUANTIZER@BITS`: a 16-bit pool in which that quantizer
    is simulated, with all that the meter keeps beside it, sketches of so many bits included.
    """
    heads = shape.heads_of_a_rank(tensor_parallel)
    name, _, argument = layout.partition(":")
    if layout in _PLAIN:
        return _plain_bytes(quantizer_registry().get(_PLAIN[layout]), shape, heads)
    if layout in ("int8_dither", "int8_dither_w") or (name == "bypass" and argument.isdecimal()):
        packed = KVLayout(
            shape.head_dim,
            shape.v_head_dim,
            bypass_pairs=int(argument or 0),
            stored_witness=layout == "int8_dither_w",
        )
        return packed_bytes_per_token(packed, heads, shape.num_layers)
    if name == "metered" and argument:
        rotary = RotarySpec(shape.head_dim, rotary_dim=shape.rotary_dim)
        spec = parse_quantizer(argument)
        quantizer, bits = quantizer_registry().get(spec.name, spec.params), spec.sketch_bits or 0
        if quantizer.bypass_pairs:
            raise InputError(f"layout is {layout!r}, but {spec.name} has packed storage only; write bypass:PAIRS")
        per_head = side_bytes_per_head(quantizer, rotary, shape.v_head_dim, 2, bits)
        flag = 0 if ClosingRule.of(quantizer).immediate else 1  # whether a token waits to be quantized
        side = side_bytes_per_token(per_head, heads, shape.num_layers) + flag
        return _plain_bytes(quantizer_registry().get("none"), shape, heads) + side
    raise InputError(
        f"layout is {layout!r}{did_you_mean(layout, LAYOUTS)}; allowed are {listed(LAYOUTS)}, bypass:PAIRS and "
        "metered:QUANTIZER"
    )


def _plain_bytes(quantizer: Quantizer, shape: ModelShape, heads: int) -> int:
    """K and V may differ in width: each takes half of what the quantizer says for both at its own width."""
    sizes = [quantizer.bytes_per_token_head(width) for width in (shape.head_dim, shape.v_head_dim)]
    if sizes[0] is None or sizes[1] is None:
        raise InputError(f"quantizer {quantizer.name!r} does not declare its bytes")
    return int((sizes[0] + sizes[1]) / 2) * heads * shape.num_layers


def capacity(layout: str, shape: ModelShape, memory: int, tensor_parallel: int = 1) -> Capacity:
    """Tokens that `memory` bytes of one rank hold in `layout`."""
    size = bytes_per_token(layout, shape, tensor_parallel)
    plain = bytes_per_token("fp16", shape, tensor_parallel)
    return Capacity(layout, size, memory // size, plain / size)
