"""Rotary embeddings of engines whose modules look up `cos_sin_cache` (SGLang, vLLM), as tables of the core.

Such a module has `rotary_dim`, `is_neox_style` and `cos_sin_cache` [POSITIONS, rotary_dim], and is called with
(positions [N], queries [N, H * D], keys [N, Hkv * D]).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from witcert_core.errors import UnsupportedError
from witcert_core.quantizers.rotary import RotarySpec, RotaryTable
from witcert_core.serving.encoder import Tables

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
WHY = "keys before RoPE cannot be had; use a quantizer of post_rope keys"


def rotary_tables(
    modules: Mapping[int, Any], head_dims: Mapping[int, int], dtype: torch.dtype, device: str | torch.device
) -> Tables:
    """The tables of `modules`, layer -> its rotary embedding or None. head_dims: channels of a key, by layer.

    Raises UnsupportedError for a layer without one, for one without a table of plain positions, and for one that does
    not turn keys as its table says (checked on random keys, so a wrong pairing of channels is found here).
    """
    for layer, rope in modules.items():
        if rope is None:
            raise UnsupportedError(f"layer {layer} has no rotary embedding beside it: {WHY}")
    for layer, rope in {id(rope): (layer, rope) for layer, rope in modules.items()}.values():
        _check(layer, rope, head_dims[layer], dtype, device)

    def table(layer: int) -> RotaryTable:
        return _table(modules[layer], head_dims[layer])

    return table


def _table(rope: Any, head_dim: int) -> RotaryTable:
    return RotaryTable(RotarySpec(head_dim, rope.rotary_dim, interleaved=not rope.is_neox_style), rope.cos_sin_cache)


def _check(layer: int, rope: Any, head_dim: int, dtype: torch.dtype, device: str | torch.device) -> None:
    name = type(rope).__name__
    cache = getattr(rope, "cos_sin_cache", None)
    if cache is None or cache.ndim != 2 or getattr(rope, "mrope_section", None) or getattr(rope, "position_start", 0):
        raise UnsupportedError(f"layer {layer} turns its keys by {name}, which has no table of plain positions: {WHY}")
    generator = torch.Generator().manual_seed(layer)
    x = torch.randn(16, 1, head_dim, generator=generator).to(dtype)
    positions = torch.randint(0, len(cache), (16,), generator=generator)
    ours = _table(rope, head_dim).rotate(x.to(device), positions.to(device))
    key = x.reshape(16, head_dim).to(device)
    _, theirs = rope(positions.to(device), key.clone(), key.clone())
    off = float((ours.reshape(16, head_dim) - theirs.float()).abs().max())
    if not off <= TOLERANCE[dtype] * float(ours.abs().max()):
        raise UnsupportedError(f"layer {layer}: {name} turns keys otherwise than its table says (by {off:.3g}): {WHY}")
