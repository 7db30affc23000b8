"""The rotary embedding of a transformers model as one table, for quantizers of keys before RoPE."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from witcert_core.errors import UnsupportedError
from witcert_core.evaluate.offline.placement import device_of
from witcert_core.quantizers.rotary import RotarySpec, RotaryTable
from witcert_core.serving.encoder import Tables

_WHY = "keys before RoPE cannot be had; use a quantizer of post_rope keys"


def rotary_tables(model: Any, head_dim: int, max_positions: int) -> Tables:
    """The embedding that all layers of `model` share, for positions below `max_positions`.

    Raises UnsupportedError for none, several, one that depends on the length, and one that the model applies otherwise
    than as pairs turned by its cosines and sines (checked on random keys).
    """
    name = type(model).__name__
    found = [module for path, module in model.named_modules() if path.split(".")[-1] == "rotary_emb"]
    if len(found) != 1:
        raise UnsupportedError(f"{name} has {len(found)} rotary embeddings, expected one for all layers: {_WHY}")
    kind = getattr(found[0], "rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise UnsupportedError(f"{name} has rotary embeddings of type {kind!r}, which depend on the length: {_WHY}")
    here = device_of(found[0])
    turned = found[0](torch.zeros(1, 1, 1, device=here), torch.arange(max_positions, device=here)[None])
    cos, sin = (t[0].float().to("cpu") for t in turned)
    half = cos.shape[-1] // 2
    interleaved = not torch.equal(cos[:, :half], cos[:, half:])
    channels = slice(0, None, 2) if interleaved else slice(0, half)
    table = RotaryTable(
        RotarySpec(head_dim, 2 * half, interleaved), torch.cat([cos[:, channels], sin[:, channels]], -1)
    )
    _check(model, table, cos, sin)
    return lambda _layer: table


def _check(model: Any, table: RotaryTable, cos: Tensor, sin: Tensor) -> None:
    module = importlib.import_module(type(model).__module__)
    turn = getattr(module, "apply_rotary_pos_emb", None)
    if turn is None:
        raise UnsupportedError(f"{type(model).__name__} does not say how it turns its keys: {_WHY}")
    keys = torch.randn(1, 1, len(cos), table.spec.dim, generator=torch.Generator().manual_seed(0))
    _, theirs = turn(keys, keys, cos[None], sin[None])
    rest = torch.zeros(1, 1, len(cos), table.spec.head_dim - table.spec.dim)
    ours = table.rotate(torch.cat([keys, rest], -1)[0].transpose(0, 1), torch.arange(len(cos)))
    if not torch.allclose(ours[:, 0, : table.spec.dim], theirs[0, 0], atol=1e-4):
        raise UnsupportedError(f"{type(model).__name__} turns its keys otherwise than its table says: {_WHY}")
