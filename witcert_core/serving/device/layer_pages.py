"""The tensors of a packed layer as kernels take them, the same in every pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from witcert_core.cache.packed import PackedLayer


@dataclass(frozen=True)
class LayerPages:
    """A layer's cache as pages of one token, in the order in which kernels take it: made once, small passes would wait.

    codes [SLOTS, 1, Hkv, D] of K and of V; their scales and the witness [SLOTS, 1, Hkv, Gr].
    """

    codes: tuple[Tensor, Tensor]
    k_scales: Tensor
    v_scales: Tensor
    witness: Tensor | None

    @classmethod
    def of(cls, layer: PackedLayer) -> LayerPages:
        witness = None if layer.k_witness is None else layer.k_witness[:, None]
        return cls((layer.k[:, None], layer.v[:, None]), layer.k_scale[:, None], layer.v_scale[:, None], witness)

    @property
    def arguments(self) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        return self.codes, self.k_scales, self.v_scales
