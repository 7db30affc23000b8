"""Where vLLM keeps the rotary embedding of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def rotary_modules(model: Any, layer_ids: Mapping[str, int]) -> dict[int, Any]:
    """The `rotary_emb` of the module that holds each attention layer (by name), None where there is none."""
    holders = dict(model.named_modules())
    found: dict[int, Any] = {}
    for name, layer in layer_ids.items():
        holder = holders.get(name.rpartition(".")[0])
        found[layer] = getattr(holder, "rotary_emb", None)
    return found
