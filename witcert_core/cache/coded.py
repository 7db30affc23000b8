"""The packed cache of a coded quantizer: the bytes of every slot, which its own `encode` and `decode` write and read.

Shapes: SLOTS slots, N tokens written, S read, Hkv local KV heads, D head_dim, Dv v_head_dim. What is kept of a token
beside its bytes, so that the meter knows its error, is a witness like any other quantizer's (`witness_store.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.quantizers.apply import named
from witcert_core.quantizers.base import Kind, QuantContext, Quantizer
from witcert_core.quantizers.coded import coder, token_layout


@dataclass(frozen=True)
class CodedLayer:
    """One layer's buffers, owned by the engine's pool: k and v [SLOTS, Hkv, bytes] of one byte an element."""

    k: Tensor
    v: Tensor


class CodedPool:
    """The core's `Pool` over the bytes of all layers of one rank, by global layer id.

    contexts: what the quantizer knows of keys and of values. Raises InputError for buffers that are not as wide as what
    the quantizer stores.
    """

    def __init__(
        self,
        layers: Mapping[int, CodedLayer],
        quantizer: Quantizer,
        contexts: Mapping[Kind, QuantContext],
    ) -> None:
        self.coders = {kind: coder(quantizer, kind) for kind in contexts}
        self.contexts = dict(contexts)
        self.layouts = {
            kind: token_layout(self.coders[kind], kind, ctx.head_dim, ctx) for kind, ctx in contexts.items()
        }
        self._bytes: dict[tuple[int, Kind], Tensor] = {}
        for number, layer in layers.items():
            self._bytes[number, "k"], self._bytes[number, "v"] = layer.k.view(torch.uint8), layer.v.view(torch.uint8)
        for (number, kind), buffer in self._bytes.items():
            if buffer.shape[-1] != self.layouts[kind].nbytes:
                raise InputError(
                    f"layer {number}: the pool has {buffer.shape[-1]} bytes for {kind} of a token and head; quantizer "
                    f"{quantizer.name!r} stores {self.layouts[kind].nbytes}"
                )

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._bytes.values())

    def store(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Encode keys [N, Hkv, D] and values [N, Hkv, Dv] into `slots` [N]."""
        self._store("k", layer, slots, positions, k)
        self._store("v", layer, slots, positions, v)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [S, Hkv, D] and values [S, Hkv, Dv] float32 that the bytes in `slots` [S] stand for."""
        return self._read("k", layer, slots), self._read("v", layer, slots)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Part of `Pool`; what is stored depends on positions: see `store`."""
        raise NotImplementedError("a packed cache is written as codes")

    def restore(self, layer: int, slots: Tensor, head: int, k: Tensor, v: Tensor) -> None:
        """Part of `Pool`; bytes have no room for exact blocks: see `RepairedCache`."""
        raise NotImplementedError("a packed cache has no room for exact blocks")

    def _store(self, kind: Kind, layer: int, slots: Tensor, positions: Tensor, exact: Tensor) -> None:
        x = exact.to(torch.float32, copy=True)  # its own: one that wrote into it would be measured against that
        mine = self.coders[kind]
        with named(mine, kind, x, layer):
            parts = mine.encode(x, kind=kind, layer=layer, positions=positions, ctx=self.contexts[kind])
            self._bytes[layer, kind][slots] = self.layouts[kind].pack(parts)

    def _read(self, kind: Kind, layer: int, slots: Tensor) -> Tensor:
        packed, mine = self._bytes[layer, kind][slots], self.coders[kind]
        with named(mine, kind, packed, layer):
            parts, nowhere = self.layouts[kind].unpack(packed), torch.zeros_like(slots)
            ctx = self.contexts[kind]
            return mine.decode(parts, kind=kind, layer=layer, positions=nowhere, ctx=ctx)
