"""The rotary embeddings of SGLang's layers, for quantizers of keys before RoPE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from witcert_core.errors import UnsupportedError
from witcert_core.rotary import RotarySpec, RotaryTable
from witcert_core.serving.encoder import Tables

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}


def rotary_tables(model: Any, layers: Sequence[int], head_dim: int, dtype: torch.dtype, device: str) -> Tables:
    """The rotary embedding beside each attention layer of `model`.

    Raises UnsupportedError for a layer without one, for one without a table of positions, and for one that does not
    turn keys as its table says (checked on random keys, so a wrong pairing of channels is found here).
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    found: dict[int, Any] = {}
    for module in model.modules():
        rope = getattr(module, "rotary_emb", None)
        for child in module.children():
            if isinstance(child, RadixAttention) and rope is not None:
                found[child.layer_id] = rope
    for layer in layers:
        if layer not in found:
            raise UnsupportedError(f"layer {layer} has no rotary embedding beside it: {_WHY}")
    distinct = {id(rope): (layer, rope) for layer, rope in found.items()}
    for layer, rope in distinct.values():
        _check(layer, rope, head_dim, dtype, device)

    def table(layer: int) -> RotaryTable:
        return _table(found[layer], head_dim)

    return table


_WHY = "keys before RoPE cannot be had; use a quantizer of post_rope keys"


def _table(rope: Any, head_dim: int) -> RotaryTable:
    return RotaryTable(RotarySpec(head_dim, rope.rotary_dim, interleaved=not rope.is_neox_style), rope.cos_sin_cache)


def _check(layer: int, rope: Any, head_dim: int, dtype: torch.dtype, device: str) -> None:
    name = type(rope).__name__
    cache = getattr(rope, "cos_sin_cache", None)
    if cache is None or cache.ndim != 2 or getattr(rope, "mrope_section", None) or getattr(rope, "position_start", 0):
        raise UnsupportedError(f"layer {layer} turns its keys by {name}, which has no table of plain positions: {_WHY}")
    generator = torch.Generator().manual_seed(layer)
    x = torch.randn(16, 1, head_dim, generator=generator).to(dtype)
    positions = torch.randint(0, len(cache), (16,), generator=generator)
    ours = _table(rope, head_dim).rotate(x.to(device), positions.to(device))
    key = x.reshape(16, head_dim).to(device)
    _, theirs = rope(positions.to(device), key.clone(), key.clone())
    off = float((ours.reshape(16, head_dim) - theirs.float()).abs().max())
    if not off <= TOLERANCE[dtype] * float(ours.abs().max()):
        raise UnsupportedError(f"layer {layer}: {name} turns keys otherwise than its table says (by {off:.3g}): {_WHY}")
