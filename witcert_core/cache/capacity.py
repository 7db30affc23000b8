"""Bytes that a token takes in a cache, all layers of one rank together: what capacity is computed from.

Shapes: L attention layers, Hkv KV heads of the rank, D head_dim, Dv v_head_dim.
"""

from __future__ import annotations

from witcert_core.cache.bands import band_map
from witcert_core.cache.sketch import sketch_bytes, value_bands
from witcert_core.quantizers.base import Quantizer
from witcert_core.quantizers.coded import coder, token_layout
from witcert_core.quantizers.dither import GROUP, num_groups
from witcert_core.quantizers.layout import KVLayout
from witcert_core.quantizers.rotary import RotarySpec

BANDS = (16, 32)
"""Bands of channels of which a key's error has a norm, at most: a byte each, and one more with a residual sketch."""
AFFORDABLE = 1 / 16
"""Share of a token's bytes that the wider choice may add: it is worth about a tenth of the bound."""
PASS_ID_BYTES = 8
"""The pass that wrote a slot, one int64 for all layers and heads."""


def packed_bytes_per_token(layout: KVLayout, num_kv_heads: int, num_layers: int) -> int:
    """Codes, scales and what else the layout keeps, and the slot's pass id: ``L Hkv bytes + 8``."""
    return layout.bytes_per_token_head * num_kv_heads * num_layers + PASS_ID_BYTES


def coded_bytes(quantizer: Quantizer, head_dim: int, v_head_dim: int) -> tuple[int, int]:
    """Bytes of a key and of a value of one head, as `CodedPool` keeps them.

    Raises QuantizerError for a quantizer whose tokens cannot be stored.
    """
    k, v = coder(quantizer, "k"), coder(quantizer, "v")
    return token_layout(k, "k", head_dim).nbytes, token_layout(v, "v", v_head_dim).nbytes


def choose_bands(
    quantizer: Quantizer, rotary: RotarySpec, v_head_dim: int, sketch_bits: int = 0, wanted: int | None = None
) -> int:
    """How many bands to keep of K's errors: those `wanted`, else 32 where what they add is a small share of the bytes.

    Counted are the bytes that the quantizer declares for K and V (of a latent cache, which keeps keys alone, half of
    them) and what the meter keeps beside them. A dithered
    quantizer without sketches is bounded by its law, and one that declares nothing is taken for a coarse one: 16.
    """
    if wanted is not None:
        return wanted
    few, many = BANDS
    declared = quantizer.bytes_per_token_head(rotary.head_dim)
    if declared is None or (quantizer.tier == "probabilistic" and not sketch_bits):
        return few
    kept = declared / 2 if rotary.latent_dim else declared
    sizes = [kept + _witness_bytes(rotary, v_head_dim, sketch_bits, bands) for bands in BANDS]
    return many if sizes[1] - sizes[0] <= AFFORDABLE * sizes[0] else few


def _witness_bytes(rotary: RotarySpec, v_head_dim: int, sketch_bits: int, bands: int) -> int:
    """One byte for V, the norms of K's bands and the sketches of both."""
    found = band_map(rotary, bands).num_bands
    values = sketch_bytes(v_head_dim, value_bands(v_head_dim).num_bands, sketch_bits)
    return 1 + found + sketch_bytes(rotary.head_dim, found, sketch_bits) + values


def side_bytes_per_head(
    quantizer: Quantizer,
    rotary: RotarySpec,
    v_head_dim: int,
    storage_bytes: int,
    sketch_bits: int = 0,
    bands: int | None = None,
) -> int:
    """What `WitnessStore` keeps of a token in one layer and KV head, beside a pool of ``storage_bytes`` an element.

    One byte for V; for K the bands' witness and the residuals' sketches, or without these the scales of a dithered
    quantizer (with a band witness of the rounding to a 16-bit pool). bands: see `choose_bands`.
    """
    groups = num_groups(rotary.head_dim, GROUP)
    chosen = choose_bands(quantizer, rotary, v_head_dim, sketch_bits, bands)
    if quantizer.tier == "probabilistic" and not sketch_bits:
        witness = groups if quantizer.stored_witness else 0
        return 1 + 2 * groups + witness + (band_map(rotary, chosen).num_bands if storage_bytes == 2 else 0)
    return _witness_bytes(rotary, v_head_dim, sketch_bits, chosen)


def side_bytes_per_token(per_head: int, num_kv_heads: int, num_layers: int) -> int:
    """The same for all layers and heads of the rank, and the slot's pass id."""
    return num_layers * num_kv_heads * per_head + PASS_ID_BYTES
