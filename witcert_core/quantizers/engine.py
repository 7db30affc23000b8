"""The engine's own cache as a black box: nothing is quantized here, what the engine stored is read back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from witcert_core.quantizers.base import Kind, QuantContext, Quantizer, check_input


@dataclass(frozen=True)
class EnginePrecision(Quantizer):
    """Names the engine's own quantization (`--kv-cache-dtype`); exact is what the model handed over.

    Simulated it is no quantizer at all: keys and values go to the engine as they are.
    """

    name: ClassVar[str] = "engine"

    def fake_quantize(self, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext) -> Tensor:
        check_input(self.name, x, kind, positions, ctx)
        return x.clone()
