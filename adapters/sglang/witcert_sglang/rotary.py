"""Where SGLang keeps the rotary embedding of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def rotary_modules(model: Any, layers: Sequence[int]) -> dict[int, Any]:
    """The `rotary_emb` beside each attention layer of `model`, None where there is none."""
    from sglang.srt.layers.radix_attention import RadixAttention

    found: dict[int, Any] = dict.fromkeys(layers)
    for module in model.modules():
        rope = getattr(module, "rotary_emb", None)
        for child in module.children():
            if isinstance(child, RadixAttention) and child.layer_id in found and rope is not None:
                found[child.layer_id] = rope
    return found
