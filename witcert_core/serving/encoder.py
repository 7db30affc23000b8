"""New keys and values through the policy's quantizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from witcert_core.dither import DitherKey
from witcert_core.errors import QuantizerError
from witcert_core.quantizers.base import DitheredQuantizer, QuantContext, Quantizer
from witcert_core.serving.calls import AttentionCall, Coded
from witcert_core.serving.geometry import Geometry


class Encoder:
    """One process's quantizer. `row_ids` [SLOTS] int64: the pass in which a slot was written, 0 for never."""

    def __init__(self, quantizer: Quantizer, geometry: Geometry, row_ids: Tensor, dither_key: DitherKey) -> None:
        self.quantizer = quantizer
        self.geometry = geometry
        self.row_ids = row_ids
        self.dither_key = dither_key

    def encode(self, call: AttentionCall) -> tuple[Coded, Coded]:
        """Keys and values of a call as the cache will give them back."""
        g = self.geometry
        context = QuantContext(
            head_ids=g.kv_head_ids,
            head_dim=g.head_dim,
            rotary=g.rotary,
            storage_dtype=g.pool_dtype,
            row_ids=self.row_ids[call.slots],
            dither_key=self.dither_key,
        )
        return (
            self._coded("k", call.exact_k, call, context),
            self._coded("v", call.exact_v, call, replace(context, head_dim=g.v_head_dim)),
        )

    def _coded(self, kind: Literal["k", "v"], exact: Tensor, call: AttentionCall, ctx: QuantContext) -> Coded:
        # A copy: a quantizer that wrote into its input would be measured against its own result.
        x = exact.to(torch.float32, copy=True)
        if isinstance(self.quantizer, DitheredQuantizer):
            codes = self.quantizer.encode(x, kind=kind, layer=call.layer, positions=call.positions, ctx=ctx)
            return Coded(codes.values, codes)
        values = self.quantizer.fake_quantize(x, kind=kind, layer=call.layer, positions=call.positions, ctx=ctx)
        if values.shape != exact.shape:
            raise QuantizerError(
                f"quantizer {self.quantizer.name!r} returned {tuple(values.shape)} for {kind} of shape "
                f"{tuple(exact.shape)} in layer {call.layer}; it must keep the shape"
            )
        return Coded(values, None)
