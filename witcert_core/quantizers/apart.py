"""Keys by one quantizer and values by another, such as 8 bits for keys, which decide what is read, and 4 for values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from witcert_core.errors import QuantizerError
from witcert_core.quantizers.base import Kind, QuantContext, Quantizer
from witcert_core.quantizers.coded import CodedQuantizer, token_layout, why_not_packed


@dataclass(frozen=True)
class KeysAndValues(Quantizer):
    """Each kind as its own quantizer has it; made by a policy with `quantizer.k` and `quantizer.v`, not registered.

    Raises QuantizerError for two that do not wait for the same tokens, and for quantizers whose keys and values belong
    together: dithered ones (one law, one row a pass), calibrated ones, and whatever an engine stores.
    """

    name: ClassVar[str] = "k and v"
    keys: Quantizer
    values: Quantizer

    def __post_init__(self) -> None:
        for kind, quantizer in (("k", self.keys), ("v", self.values)):
            if quantizer.tier != "deterministic" or quantizer.state != "none" or quantizer.name == "engine":
                raise QuantizerError(
                    f"quantizer.{kind}: {quantizer.name!r} takes keys and values together; allowed are quantizers "
                    "without dither or calibration, and not 'engine'"
                )
        waits = [(quantizer.token_group, quantizer.recent_tokens) for quantizer in (self.keys, self.values)]
        if waits[0] != waits[1]:
            raise QuantizerError(
                f"quantizer.k {self.keys.name!r} and quantizer.v {self.values.name!r} wait for other tokens: groups "
                f"of {waits[0][0]} and {waits[1][0]}, {waits[0][1]} and {waits[1][1]} recent ones exact; name two alike"
            )
        # A frozen class is told apart by what it is made of, as its messages and reports should.
        for flag, value in {
            "name": f"k={self.keys.name},v={self.values.name}",
            "space": self.keys.space,
            "token_group": self.keys.token_group,
        }.items():
            object.__setattr__(self, flag, value)

    @property
    def recent_tokens(self) -> int:
        return self.keys.recent_tokens

    def of(self, kind: Kind) -> Quantizer:
        return self.keys if kind == "k" else self.values

    def fake_quantize(self, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext) -> Tensor:
        return self.of(kind).fake_quantize(x, kind=kind, layer=layer, positions=positions, ctx=ctx)

    def bytes_per_token_head(self, head_dim: int) -> float | None:
        """Of keys and of values, each by its own parts or, where these are not known, half of what it declares."""
        sizes = [_bytes_of(self.of("k"), "k", head_dim), _bytes_of(self.of("v"), "v", head_dim)]
        return None if sizes[0] is None or sizes[1] is None else sizes[0] + sizes[1]


def _bytes_of(quantizer: Quantizer, kind: Kind, head_dim: int) -> float | None:
    if isinstance(quantizer, CodedQuantizer) and why_not_packed(quantizer) is None:
        return float(token_layout(quantizer, kind, head_dim).nbytes)
    both = quantizer.bytes_per_token_head(head_dim)
    return None if both is None else both / 2
