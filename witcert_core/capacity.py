"""Bytes that a token takes in a cache, all layers of one rank together: what capacity is computed from.

Shapes: L attention layers, Hkv KV heads of the rank, D head_dim, Dv v_head_dim.
"""

from __future__ import annotations

from witcert_core.bands import band_map
from witcert_core.dither import GROUP, num_groups
from witcert_core.layout import KVLayout
from witcert_core.quantizers.base import Quantizer
from witcert_core.rotary import RotarySpec

ROW_ID_BYTES = 8
"""A slot's dither row, one int64 for all layers and heads."""


def packed_bytes_per_token(layout: KVLayout, num_kv_heads: int, num_layers: int) -> int:
    """Codes, scales and what else the layout keeps, and the slot's row id: ``L Hkv bytes + 8``."""
    return layout.bytes_per_token_head * num_kv_heads * num_layers + ROW_ID_BYTES


def side_bytes_per_token(
    quantizer: Quantizer, rotary: RotarySpec, num_kv_heads: int, num_layers: int, storage_bytes: int
) -> int:
    """What the meter keeps beside a pool of ``storage_bytes`` an element that a quantizer is simulated in.

    One byte for V; for K the bands' witness, or the scales of a dithered quantizer (with a band witness of the
    rounding to a 16-bit pool), see `store.SlotStore`; and the row id.
    """
    groups = num_groups(rotary.head_dim, GROUP)
    bands = band_map(rotary).num_bands
    if quantizer.tier == "dither":
        witness = groups if quantizer.stored_witness else 0
        per_head = 1 + 2 * groups + witness + (bands if storage_bytes == 2 else 0)
    else:
        per_head = 1 + bands
    return num_layers * num_kv_heads * per_head + ROW_ID_BYTES
