"""The rotary embedding of a transformers model as tables, for quantizers of keys before RoPE."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from witcert_core.errors import UnsupportedError
from witcert_core.evaluate.offline.placement import device_of
from witcert_core.quantizers.rotary import RotarySpec, RotaryTable
from witcert_core.serving.encoder import Tables

_WHY = "keys before RoPE cannot be had; use a quantizer of post_rope keys"


def rotary_tables(model: Any, head_dims: Mapping[int, int], max_positions: int) -> Tables:
    """The embeddings of the layers of `model`, for positions below `max_positions`. head_dims: channels of a key, by
    layer.

    Raises UnsupportedError for none, several modules, one that depends on the length, and one that the model applies
    otherwise than as pairs turned by its cosines and sines (checked on random keys).
    """
    name = type(model).__name__
    found = [module for path, module in model.named_modules() if path.split(".")[-1] == "rotary_emb"]
    if len(found) != 1:
        raise UnsupportedError(f"{name} has {len(found)} rotary embeddings, expected one for all layers: {_WHY}")
    types: Sequence[str] = ()
    if "layer_type" in inspect.signature(found[0].forward).parameters:  # one module, which turns by the type of a layer
        types = model.config.get_text_config().layer_types
    kinds = getattr(found[0], "rope_type", "default")
    for kind in kinds.values() if isinstance(kinds, Mapping) else (kinds,):
        if kind in ("dynamic", "longrope"):
            raise UnsupportedError(f"{name} has rotary embeddings of type {kind!r}, which depend on the length: {_WHY}")
    of_layers = {layer: (dim, types[layer] if types else "") for layer, dim in head_dims.items()}
    tables = {key: _table(model, found[0], *key, max_positions) for key in set(of_layers.values())}
    return lambda layer: tables[of_layers[layer]]


def _table(model: Any, module: Any, head_dim: int, layer_type: str, max_positions: int) -> RotaryTable:
    """layer_type: '' where all layers turn alike."""
    here, typed = device_of(module), [layer_type] if layer_type else []
    turned = module(torch.zeros(1, 1, 1, device=here), torch.arange(max_positions, device=here)[None], *typed)
    cos, sin = (t[0].float().to("cpu") for t in turned)
    half = cos.shape[-1] // 2
    interleaved = not torch.equal(cos[:, :half], cos[:, half:])
    channels = slice(0, None, 2) if interleaved else slice(0, half)
    table = RotaryTable(
        RotarySpec(head_dim, 2 * half, interleaved), torch.cat([cos[:, channels], sin[:, channels]], -1)
    )
    _check(model, table, cos, sin)
    return table


def _check(model: Any, table: RotaryTable, cos: Tensor, sin: Tensor) -> None:
    module = importlib.import_module(type(model).__module__)
    turn = getattr(module, "apply_rotary_pos_emb", None)
    if turn is None:
        raise UnsupportedError(f"{type(model).__name__} does not say how it turns its keys: {_WHY}")
    keys = torch.randn(1, 1, len(cos), table.spec.dim, generator=torch.Generator().manual_seed(0))
    alone = "k" not in inspect.signature(turn).parameters  # Gemma 4 turns queries and keys by a call each
    theirs = turn(keys, cos[None], sin[None]) if alone else turn(keys, keys, cos[None], sin[None])[1]
    rest = torch.zeros(1, 1, len(cos), table.spec.head_dim - table.spec.dim)
    ours = table.rotate(torch.cat([keys, rest], -1)[0].transpose(0, 1), torch.arange(len(cos)))
    if not torch.allclose(ours[:, 0, : table.spec.dim], theirs[0, 0], atol=1e-4):
        raise UnsupportedError(f"{type(model).__name__} turns its keys otherwise than its table says: {_WHY}")
