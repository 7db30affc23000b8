"""Bytes that a token takes in a cache, all layers of one rank together: what capacity is computed from.

Shapes: L attention layers, Hkv KV heads of the rank, D head_dim, Dv v_head_dim.
"""

from __future__ import annotations

from witcert_core.bands import band_map
from witcert_core.dither import GROUP, num_groups
from witcert_core.layout import KVLayout
from witcert_core.quantizers.base import Quantizer
from witcert_core.rotary import RotarySpec
from witcert_core.sketch import sketch_bytes, value_bands

ROW_ID_BYTES = 8
"""A slot's dither row, one int64 for all layers and heads."""


def packed_bytes_per_token(layout: KVLayout, num_kv_heads: int, num_layers: int) -> int:
    """Codes, scales and what else the layout keeps, and the slot's row id: ``L Hkv bytes + 8``."""
    return layout.bytes_per_token_head * num_kv_heads * num_layers + ROW_ID_BYTES


def side_bytes_per_head(
    quantizer: Quantizer, rotary: RotarySpec, v_head_dim: int, storage_bytes: int, sketch_bits: int = 0
) -> int:
    """What `store.SlotStore` keeps of a token in one layer and KV head, beside a pool of ``storage_bytes`` an element.

    One byte for V; for K the bands' witness and the residuals' sketches, or without these the scales of a dithered
    quantizer (with a band witness of the rounding to a 16-bit pool).
    """
    groups = num_groups(rotary.head_dim, GROUP)
    bands = band_map(rotary).num_bands
    if quantizer.tier == "dither" and not sketch_bits:
        witness = groups if quantizer.stored_witness else 0
        return 1 + 2 * groups + witness + (bands if storage_bytes == 2 else 0)
    values = sketch_bytes(v_head_dim, value_bands(v_head_dim).num_bands, sketch_bits)
    return 1 + bands + sketch_bytes(rotary.head_dim, bands, sketch_bits) + values


def side_bytes_per_token(per_head: int, num_kv_heads: int, num_layers: int) -> int:
    """The same for all layers and heads of the rank, and the slot's row id."""
    return num_layers * num_kv_heads * per_head + ROW_ID_BYTES
