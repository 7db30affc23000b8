"""What a quantizer is: a frozen dataclass with one tensor function, or a plain function with a decorator.

Shapes: N tokens, H local KV heads, D channels of a head, G = ceil(D / group) groups of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from witcert_core.errors import QuantizerError
from witcert_core.quantizers.dither import DitherKey
from witcert_core.quantizers.rotary import RotarySpec

Kind = Literal["k", "v"]
Space = Literal["post_rope", "pre_rope"]
State = Literal["none", "request"]
Tier = Literal["deterministic", "probabilistic"]

KINDS: tuple[Kind, ...] = ("k", "v")


@dataclass(frozen=True)
class QuantContext:
    """What a quantizer may know beyond the tensor; one per layer and forward pass, never changed.

    head_ids: the *global* ids of the H local KV heads, so that a head gives the same codes on any TP rank.
    rotary: which channels RoPE turns. Of a latent cache (multi-head latent attention) its `parts` tell the channels
    that are `latent` from those that are `rope`: there H is 1, D is both together, kind is "k"; values are the
    latent as the key was quantized, and are not quantized again.
    storage_dtype: the dtype the cache keeps the result in (the caller casts to it afterwards).
    pass_ids [N] int64 and dither_key: only there for dithered quantizers.
    state [N, H, W] float32: only there for calibrated ones, what `calibrate` made of each token's own request.

    Example:
        >>> import torch, witcert_core as wc
        >>> ctx = wc.QuantContext((0, 1), 64, wc.RotarySpec(64), torch.bfloat16)
        >>> ctx.head_ids, ctx.pass_ids
        ((0, 1), None)
    """

    head_ids: tuple[int, ...]
    head_dim: int
    rotary: RotarySpec
    storage_dtype: torch.dtype
    pass_ids: Tensor | None = None
    dither_key: DitherKey | None = None
    state: Tensor | None = None


@dataclass(frozen=True)
class Quantizer(ABC):
    """A lossy map of keys and values. Subclass as a frozen dataclass; its fields are `quantizer.params`.

    Class flags:
      name            what a policy calls it
      space           whether it wants keys after the rotary embedding or before (the core turns them; values are
                      what they are)
      token_group     tokens quantized together, positions i * token_group onwards; handed over whole once it is closed
      state           "request" if codes depend on a calibration over the first tokens of the request
      tier            "probabilistic" if the error follows the dither law, else "deterministic"
      kinds_alike     whether values are quantized as keys are: both of a token may then come as two tokens of kind
                      "k" in one call; only for quantizers of post-RoPE keys that take each token by itself
      stored_witness  whether the cache keeps one residual norm per group beside the codes

    Example:
        >>> from dataclasses import dataclass
        >>> import witcert_core as wc
        >>> @wc.register
        ... @dataclass(frozen=True)
        ... class Rounded(wc.Quantizer):
        ...     name = "rounded"
        ...     step: float = 0.125
        ...     def fake_quantize(self, x, *, kind, layer, positions, ctx):
        ...         return (x / self.step).round().clamp(-127, 127) * self.step
        >>> wc.check_quantizer(Rounded())
    """

    name: ClassVar[str]
    space: ClassVar[Space] = "post_rope"
    token_group: ClassVar[int] = 1
    state: ClassVar[State] = "none"
    tier: ClassVar[Tier] = "deterministic"
    kinds_alike: ClassVar[bool] = False
    stored_witness: ClassVar[bool] = False

    @property
    def bypass_pairs(self) -> int:
        """Channel pairs of K that a packed cache keeps in 16 bit, out of the codes."""
        return 0

    @property
    def recent_tokens(self) -> int:
        """Newest tokens of a request that stay exact, beside those of its open group."""
        return 0

    @property
    def calibration_tokens(self) -> int:
        """First tokens of a request that `calibrate` is shown; all its tokens stay exact until it has so many."""
        return 0

    def of(self, kind: Kind) -> Quantizer:
        """What quantizes keys, or values: itself, but for one that is put together of two (`apart.py`)."""
        return self

    @abstractmethod
    def fake_quantize(self, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext) -> Tensor:
        """What the cache would give back for x.

        x [N, H, D] float32, not to be written to; positions [N] int64. Returns a new [N, H, D] float32.
        A finite x gives a finite result. A NaN or Inf may spoil its own token and head, nothing else:
        the meter then finds no bound there and says 1.
        """

    def bytes_per_token_head(self, head_dim: int) -> float | None:
        """Bytes of K and V together, scales included, for one token and KV head; None when not known.

        Of a quantized token: exact ones (recent, calibrating, sinks) are few and the same for any length.
        """
        return None


@dataclass(frozen=True)
class Encoded:
    """The packed form of a dithered tensor and what it decodes to.

    Example:
        >>> import torch, witcert_core as wc
        >>> codes, scales = torch.ones(1, 2, 64, dtype=torch.int8), torch.full((1, 2, 2), 0.5).half()
        >>> wc.Encoded(codes, scales, codes * 0.5).values[0, 0, 0].item()
        0.5
    """

    codes: Tensor  # [N, H, D] int8
    scales: Tensor  # [N, H, G] float16, rounded up
    values: Tensor  # [N, H, D] float32


@dataclass(frozen=True)
class DitheredQuantizer(Quantizer):
    """A quantizer with subtractive dither, whose error law gives radii without a stored witness.

    Example:
        >>> import witcert_core as wc
        >>> policy = wc.Policy(version=1, quantizer={"name": "int8_dither"})
        >>> isinstance(policy.resolved_quantizer, wc.DitheredQuantizer), policy.tier
        (True, 'probabilistic')
    """

    tier: ClassVar[Tier] = "probabilistic"

    @abstractmethod
    def encode(self, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext) -> Encoded:
        """The codes, scales and decoded values of x [N, H, D] float32."""

    def fake_quantize(self, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext) -> Tensor:
        return self.encode(x, kind=kind, layer=layer, positions=positions, ctx=ctx).values


@dataclass(frozen=True)
class CalibratedQuantizer(Quantizer):
    """A quantizer whose codes depend on the first `calibration_tokens` tokens of the request, and on nothing else.

    Requests that share these tokens share the state. Give `calibration_tokens` as a field with a default.

    Example:
        >>> from dataclasses import dataclass
        >>> import witcert_core as wc
        >>> @dataclass(frozen=True)
        ... class Peaks(wc.CalibratedQuantizer):
        ...     name = "peaks"
        ...     calibration_tokens: int = 16
        ...     def calibrate(self, x, *, kind, layer, positions, ctx):
        ...         return x.abs().amax(dim=(0, 2))[:, None].nan_to_num(1.0, 1.0).clamp(min=1e-6)
        ...     def fake_quantize(self, x, *, kind, layer, positions, ctx):
        ...         step = ctx.state / 7
        ...         return (x / step).round().clamp(-7, 7) * step
        >>> wc.check_quantizer(Peaks())
    """

    state: ClassVar[State] = "request"

    @property
    @abstractmethod
    def calibration_tokens(self) -> int: ...

    @abstractmethod
    def calibrate(self, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext) -> Tensor:
        """The state [H, W] float32 of one request, from its first tokens x [calibration_tokens, H, D] float32.

        Head by head: a NaN may spoil the state of its own head only.
        """


def check_kinds_alike(quantizer: Quantizer) -> None:
    """Raise QuantizerError for a quantizer that says `kinds_alike` and needs to know keys from values all the same."""
    flags = {"space": "post_rope", "token_group": 1, "state": "none", "tier": "deterministic", "recent_tokens": 0}
    if quantizer.kinds_alike and any(getattr(quantizer, flag) != value for flag, value in flags.items()):
        raise QuantizerError(f"quantizer {quantizer.name!r}: kinds_alike needs {flags}; leave kinds_alike false")


def check_input(name: str, x: Tensor, kind: str, positions: Tensor, ctx: QuantContext) -> None:
    """Raise QuantizerError unless x [N, H, D], kind and positions [N] are what fake_quantize promises its quantizer."""
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
