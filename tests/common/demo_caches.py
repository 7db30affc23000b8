"""Caches for the offline evaluation: the registered quantizers of WitCert, and a plain cast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from witcert_demo.model import ModelConfig
from witcert_demo.training.offline import FakeQuantize

from witcert_core.quantizers import REGISTRY, QuantContext
from witcert_core.quantizers.dither import DitherKey
from witcert_core.quantizers.rotary import RotarySpec

_DITHER_KEY = DitherKey(seed=0, nonce=0)


def bfloat16_cache(x: Tensor, /, *, kind: Literal["k", "v"], layer: int, positions: Tensor) -> Tensor:
    """The 16-bit cache of an engine: ``x`` rounded to bfloat16."""
    return x.to(torch.bfloat16).to(x.dtype)


def quantized_cache(name: str, config: ModelConfig, params: Mapping[str, Any] | None = None) -> FakeQuantize:
    """Cache of the registered quantizer ``name`` with ``params``, stored as float32.

    Dithered quantizers get one row per position. Raises ``ValueError`` for a quantizer that needs closed
    token groups, request state or keys before the rotation, which this evaluation does not model.
    """
    quantizer = REGISTRY.get(name, params)
    if quantizer.token_group != 1 or quantizer.state != "none" or quantizer.space != "post_rope":
        raise ValueError(
            f"quantizer {name!r} has token_group {quantizer.token_group}, state {quantizer.state!r} and "
            f"space {quantizer.space!r}; the offline evaluation takes token_group 1, state 'none' and "
            "space 'post_rope'"
        )
    head_ids = tuple(range(config.num_key_value_heads))
    rotary = RotarySpec(config.head_dim)

    def fake_quantize(x: Tensor, /, *, kind: Literal["k", "v"], layer: int, positions: Tensor) -> Tensor:
        context = QuantContext(
            head_ids=head_ids,
            head_dim=config.head_dim,
            rotary=rotary,
            storage_dtype=torch.float32,
            pass_ids=positions + 1,
            dither_key=_DITHER_KEY,
        )
        return quantizer.fake_quantize(x, kind=kind, layer=layer, positions=positions, ctx=context)

    return fake_quantize
