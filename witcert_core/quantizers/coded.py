"""Quantizers that say what they would store: it is counted and, where tokens stand by themselves, can be kept.

Shapes: N tokens, H local KV heads, D channels of a head.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from witcert_core.errors import QuantizerError
from witcert_core.quantizers.base import KINDS, DitheredQuantizer, Kind, QuantContext, Quantizer, check_input
from witcert_core.quantizers.packing import Part, TokenLayout
from witcert_core.quantizers.rotary import RotarySpec


@dataclass(frozen=True)
class CodedQuantizer(Quantizer):
    """A quantizer that says what it would store: `decode` must get along with what `encode` made.

    So its number of bytes can be counted, and `fake_quantize` cannot keep more than that. One that takes each token by
    itself can be stored as well (`quantizer.storage: packed`, see `why_not_packed`): the core makes bytes of the parts,
    and hands the parts of any tokens, in any order, back to `decode`, with positions 0.

    Example:
        >>> from dataclasses import dataclass, replace
        >>> import torch, witcert_core as wc
        >>> @dataclass(frozen=True)
        ... class Signs(wc.CodedQuantizer):
        ...     name = "signs"
        ...     def encode(self, x, *, kind, layer, positions, ctx):
        ...         size = x.abs().amax(-1).clamp(max=65504).half()
        ...         return {"sign": wc.Part((x < 0).to(torch.uint8), 1), "size": wc.Part(size, 16)}
        ...     def decode(self, parts, *, kind, layer, positions, ctx):
        ...         return parts["size"].values.float()[..., None] * (1 - 2.0 * parts["sign"].values)
        >>> wc.check_quantizer(Signs())
        >>> Signs().bytes_per_token_head(128)
        36.0
    """

    @property
    def sink_tokens(self) -> int:
        """Tokens at the start of a request that it leaves exact ("attention sinks")."""
        return 0

    @abstractmethod
    def encode(self, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext) -> Mapping[str, Part]:
        """Everything stored for x [N, H, D] float32."""

    @abstractmethod
    def decode(
        self, parts: Mapping[str, Part], *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext
    ) -> Tensor:
        """x~ [N, H, D] float32 from the parts alone."""

    def fake_quantize(self, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext) -> Tensor:
        check_input(self.name, x, kind, positions, ctx)
        parts = self.encode(x, kind=kind, layer=layer, positions=positions, ctx=ctx)
        values = self.decode(parts, kind=kind, layer=layer, positions=positions, ctx=ctx)
        return torch.where((positions < self.sink_tokens)[:, None, None], x, values) if self.sink_tokens else values

    def bytes_per_token_head(self, head_dim: int) -> float:
        """Those of its parts; one that groups tokens or calibrates has to say it."""
        if self.token_group > 1 or self.state != "none":
            raise QuantizerError(
                f"quantizer {self.name!r} does not declare its bytes: with token groups or a state, define "
                "bytes_per_token_head"
            )
        return float(sum(token_layout(self, kind, head_dim).nbytes for kind in KINDS))


def coder(quantizer: Quantizer, kind: Kind) -> CodedQuantizer:
    """What encodes and decodes keys, or values; QuantizerError for a quantizer of which tokens cannot be stored."""
    found = quantizer.of(kind)
    if not isinstance(found, CodedQuantizer) or why_not_packed(found):
        why = why_not_packed(found) or "has a layout of its own"
        raise QuantizerError(f"quantizer {found.name!r} {why}")
    return found


def token_layout(quantizer: CodedQuantizer, kind: Kind, head_dim: int, ctx: QuantContext | None = None) -> TokenLayout:
    """What is stored of one token and KV head of `head_dim` channels: the parts of one whose channels are all 0.

    ctx: of the cache it is for; None where only bytes are asked for.
    Raises QuantizerError for parts that cannot be stored.
    """
    if ctx is None:
        ctx = QuantContext((0,), head_dim, RotarySpec(head_dim, rotary_dim=0), torch.bfloat16)
    zeros, place = torch.zeros(1, 1, head_dim), torch.zeros(1, dtype=torch.int64)
    ctx = replace(ctx, head_ids=ctx.head_ids[:1])
    try:
        return TokenLayout.of(quantizer.encode(zeros, kind=kind, layer=0, positions=place, ctx=ctx))
    except QuantizerError as error:
        raise QuantizerError(f"quantizer {quantizer.name!r}: {error}") from error


def why_not_packed(quantizer: Quantizer) -> str | None:
    """Why a cache cannot keep its tokens packed; None for a quantizer whose tokens are bytes, each by itself."""
    apart = [quantizer.of(kind) for kind in KINDS]
    if apart[0] is not quantizer:
        said = [(kind, why_not_packed(part)) for kind, part in zip(KINDS, apart, strict=True)]
        return next((f"has a quantizer.{kind} that {why}" for kind, why in said if why), None)
    if isinstance(quantizer, DitheredQuantizer):
        return None  # codes and scales of the packed INT8 cache
    if not isinstance(quantizer, CodedQuantizer):
        return "has no encode and decode (witcert_core.CodedQuantizer), so it does not say what it stores"
    if quantizer.token_group > 1:
        return f"stores {quantizer.token_group} tokens together"
    if quantizer.state != "none":
        return "calibrates on each request"
    if quantizer.recent_tokens or quantizer.sink_tokens:
        return "keeps the newest or the first tokens of a request exact"
    if quantizer.space != "post_rope":
        return "takes keys before RoPE"
    return None
