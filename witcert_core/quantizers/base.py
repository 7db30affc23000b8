"""What a quantizer is: a frozen dataclass with one tensor function, or a plain function with a decorator.

Shapes: N tokens, H local KV heads, D channels of a head, G = ceil(D / group) groups of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from witcert_core.dither import DitherKey
from witcert_core.errors import QuantizerError
from witcert_core.rotary import RotarySpec

Kind = Literal["k", "v"]
Space = Literal["post_rope", "pre_rope"]
State = Literal["none", "request"]
Tier = Literal["witness", "dither"]

KINDS: tuple[Kind, ...] = ("k", "v")


@dataclass(frozen=True)
class QuantContext:
    """What a quantizer may know beyond the tensor; one per layer and forward pass, never changed.

    head_ids: the *global* ids of the H local KV heads, so that a head gives the same codes on any TP rank.
    storage_dtype: the dtype the cache keeps the result in (the caller casts to it afterwards).
    row_ids [N] int64 and dither_key: only there for dithered quantizers.
    """

    head_ids: tuple[int, ...]
    head_dim: int
    rotary: RotarySpec
    storage_dtype: torch.dtype
    row_ids: Tensor | None = None
    dither_key: DitherKey | None = None


@dataclass(frozen=True)
class Quantizer(ABC):
    """A lossy map of keys and values. Subclass as a frozen dataclass; its fields are `quantizer.params`.

    Class flags:
      name            what a policy calls it
      space           whether it wants keys after the rotary embedding or before (the adapter rotates)
      token_group     tokens quantized together; a group is handed over whole once it is closed
      state           "request" if a token's codes depend on earlier tokens of its request
      tier            "dither" if the error follows the dither law, else "witness"
      stored_witness  whether the cache keeps one residual norm per group beside the codes
    """

    name: ClassVar[str]
    space: ClassVar[Space] = "post_rope"
    token_group: ClassVar[int] = 1
    state: ClassVar[State] = "none"
    tier: ClassVar[Tier] = "witness"
    stored_witness: ClassVar[bool] = False

    @abstractmethod
    def fake_quantize(
        self, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext
    ) -> Tensor:
        """What the cache would give back for x.

        x [N, H, D] float32, not to be written to; positions [N] int64. Returns a new [N, H, D] float32.
        A finite x gives a finite result. A NaN or Inf may spoil its own token and head, nothing else:
        the meter then finds no bound there and says 1.
        """

    def bytes_per_token_head(self, head_dim: int) -> float | None:
        """Bytes of K and V together, scales included, for one token and KV head; None when not known."""
        return None


@dataclass(frozen=True)
class Encoded:
    """The packed form of a dithered tensor and what it decodes to."""

    codes: Tensor  # [N, H, D] int8
    scales: Tensor  # [N, H, G] float16, rounded up
    values: Tensor  # [N, H, D] float32


@dataclass(frozen=True)
class DitheredQuantizer(Quantizer):
    """A quantizer with subtractive dither, whose error law gives radii without a stored witness."""

    tier: ClassVar[Tier] = "dither"

    @abstractmethod
    def encode(self, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext) -> Encoded:
        """The codes, scales and decoded values of x [N, H, D] float32."""

    def fake_quantize(
        self, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext
    ) -> Tensor:
        return self.encode(x, kind=kind, layer=layer, positions=positions, ctx=ctx).values


def check_input(name: str, x: Tensor, kind: str, positions: Tensor, ctx: QuantContext) -> None:
    """Raise QuantizerError unless x, kind and positions are what fake_quantize promises its quantizer."""
    heads, dim = len(ctx.head_ids), ctx.head_dim
    if kind not in KINDS:
        raise QuantizerError(f"quantizer {name!r}: kind is {kind!r}; allowed: 'k', 'v'")
    if x.ndim != 3 or tuple(x.shape[1:]) != (heads, dim):
        raise QuantizerError(
            f"quantizer {name!r}: x has shape {tuple(x.shape)}; expected [N, {heads}, {dim}] "
            "(tokens, head_ids of the context, head_dim of the context)"
        )
    if x.dtype != torch.float32:
        raise QuantizerError(f"quantizer {name!r}: x is {x.dtype}; expected torch.float32")
    if tuple(positions.shape) != (x.shape[0],):
        raise QuantizerError(
            f"quantizer {name!r}: positions has shape {tuple(positions.shape)}; expected [{x.shape[0]}]"
        )
