"""Keys and values through the policy's quantizer, as the cache will give them back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from witcert_core.errors import QuantizerError, UnsupportedError
from witcert_core.quantizers import apply
from witcert_core.quantizers.base import (
    KINDS,
    CalibratedQuantizer,
    DitheredQuantizer,
    Kind,
    QuantContext,
    Quantizer,
    check_kinds_alike,
)
from witcert_core.quantizers.dither import DitherKey
from witcert_core.quantizers.rotary import RotaryTable
from witcert_core.serving.calls import Quantized
from witcert_core.serving.geometry import Geometry

Tables = Callable[[int], RotaryTable]
"""Layer -> its rotary embedding, read anew for every call: engines let their tables grow."""


class Encoder:
    """One process's quantizer. `pass_ids` [SLOTS] int64: the pass in which a slot was written, 0 for never.

    tables: the engine's rotary embeddings; UnsupportedError if a quantizer of pre-RoPE keys comes without.
    """

    def __init__(
        self,
        quantizer: Quantizer,
        geometry: Geometry,
        pass_ids: Tensor,
        dither_key: DitherKey,
        tables: Tables | None = None,
    ) -> None:
        if quantizer.space == "pre_rope" and geometry.latent:
            raise UnsupportedError(
                f"quantizer {quantizer.name!r} takes keys before RoPE, which are not had back from a latent cache "
                "(MLA); use a quantizer of post_rope keys"
            )
        if geometry.latent and quantizer.of("v") is not quantizer:
            raise UnsupportedError(
                f"quantizer {quantizer.name!r} quantizes values by themselves, which a latent cache (MLA) reads out of "
                "its keys; name one quantizer for both"
            )
        if quantizer.space == "pre_rope" and tables is None:
            raise UnsupportedError(
                f"quantizer {quantizer.name!r} takes keys before RoPE, and the rotary embeddings of this engine and "
                "model are not known; use a quantizer of post_rope keys"
            )
        check_kinds_alike(quantizer)
        self.quantizer = quantizer
        self.kinds: tuple[Kind, ...] = ("k",) if geometry.latent else KINDS
        """Of what is quantized by itself."""
        self.geometry = geometry
        self.pass_ids = pass_ids
        self.dither_key = dither_key
        self.tables = tables
        self.contexts: dict[Kind, QuantContext] = {kind: self._context(kind) for kind in KINDS}

    def encode(
        self,
        layer: int,
        slots: Tensor,
        positions: Tensor,
        exact_k: Tensor,
        exact_v: Tensor,
        states: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> tuple[Quantized, Quantized]:
        """Tokens of `slots` [N]: exact_k [N, Hkv, D] and exact_v [N, Hkv, Dv] in the pool's dtype.

        Of a latent cache keys alone are quantized; values are read out of them.
        states: of a calibrated quantizer, for keys and values, [N, Hkv, W] each.
        """
        k, v = self.contexts["k"], self.contexts["v"]
        if not self.geometry.latent and self.quantizer.kinds_alike and exact_k.shape == exact_v.shape:
            keys, values = apply.fake_quantize_both(
                self.quantizer,
                exact_k.to(torch.float32),
                exact_v.to(torch.float32),
                layer=layer,
                positions=positions,
                ctx=k,
            )
            return Quantized(keys, None), Quantized(values, None)
        if self.quantizer.tier == "probabilistic":
            rows, key = self.pass_ids[slots], self.dither_key
            k, v = replace(k, pass_ids=rows, dither_key=key), replace(v, pass_ids=rows, dither_key=key)
        if states[0] is not None or states[1] is not None:
            k, v = replace(k, state=states[0]), replace(v, state=states[1])
        coded = self._coded("k", exact_k, layer, positions, k)
        if self.geometry.latent:
            return coded, coded.leading(self.geometry.v_head_dim)
        return coded, self._coded("v", exact_v, layer, positions, v)

    def calibrate(self, kind: Kind, layer: int, exact: Tensor) -> Tensor:
        """The state [Hkv, W] of a request whose first tokens have keys or values `exact` [C, Hkv, D]."""
        if not isinstance(self.quantizer, CalibratedQuantizer):
            raise QuantizerError(f"quantizer {self.quantizer.name!r} is not calibrated")
        return apply.calibrate(
            self.quantizer,
            exact.to(torch.float32),
            kind=kind,
            layer=layer,
            positions=torch.arange(exact.shape[0], device=exact.device),
            ctx=self.contexts[kind],
            table=self._table(layer),
        )

    def _context(self, kind: Kind) -> QuantContext:
        g = self.geometry
        return QuantContext(
            head_ids=g.kv_head_ids,
            head_dim=g.head_dim if kind == "k" else g.v_head_dim,
            rotary=g.rotary,
            storage_dtype=g.pool_dtype,
        )

    def _table(self, layer: int) -> RotaryTable | None:
        return self.tables(layer) if self.tables is not None and self.quantizer.space == "pre_rope" else None

    def _coded(self, kind: Kind, exact: Tensor, layer: int, positions: Tensor, ctx: QuantContext) -> Quantized:
        x = exact.to(torch.float32)
        if isinstance(self.quantizer, DitheredQuantizer):
            # A copy: a quantizer that wrote into its input would be measured against its own result.
            codes = self.quantizer.encode(x.clone(), kind=kind, layer=layer, positions=positions, ctx=ctx)
            return Quantized(codes.values, codes)
        table = self._table(layer)
        values = apply.fake_quantize(
            self.quantizer, x, kind=kind, layer=layer, positions=positions, ctx=ctx, table=table
        )
        return Quantized(values, None)
