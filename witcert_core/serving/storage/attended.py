"""One layer after its attention: what came out of it, and what its metered rows read, while that is still there.

Shapes: N new tokens, R metered rows, S tokens a row sees, H query heads, Hkv KV heads, D head_dim, Dv v_head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from witcert_core.errors import UnsupportedError
from witcert_core.meter.audit import FormatError, Read
from witcert_core.meter.protocols import Radii
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.device.sums import Sums
from witcert_core.serving.forward import Pass

Rewritten = Callable[[int, Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]], None]
"""Told of every later rewrite of tokens: layer, slots [N], (K, V) exact and (K, V) as stored from now on."""


@dataclass(frozen=True)
class RowTokens:
    """What each metered row read, by place: slots, or places in what was gathered for the pass.

    seen: per row the places [S] of its tokens in order of position, whatever its window. exact_k [PLACES, Hkv, D]: for
    audits, or None. known: per row, whether what the engine read for it is known. format_error: what a kernel's product
    with codes errs by.
    """

    seen: list[Tensor]
    read: Read
    radii: Radii
    exact_k: Tensor | None
    known: Sequence[bool]
    format_error: FormatError | None = None


@dataclass
class Attended:
    """out: the layer's output, whatever its shape. heads [N, H, Dv]: a view of it. call: with the arithmetic of the
    attention that ran. find_tokens: what the rows of the pass read. exact_k [SLOTS, Hkv, D]: for audits, or None. sums:
    of the rows, and the deterministic ones beside them, where the attention took them itself. slot_error: what its
    product with codes errs by, by slot.
    """

    call: AttentionCall
    out: Tensor
    heads: Tensor
    find_tokens: Callable[[], RowTokens]
    exact_k: Tensor | None = None
    sums: tuple[Sums, Sums | None] | None = None
    slot_error: FormatError | None = None

    @cached_property
    def tokens(self) -> RowTokens:
        return self.find_tokens()


class Storage(Protocol):
    """Where tokens live: written, quantized when it is time, and attended to. No meter is in it."""

    @property
    def bytes_side(self) -> int:
        """Bytes of what is remembered of each slot beside the engine's pool."""
        ...

    @property
    def bytes_audit(self) -> int:
        """Bytes of the exact keys and values that audits of everything keep."""
        ...

    def begin_pass(self, now: Pass) -> None:
        """A pass is about to write into its slots."""
        ...

    def moved(self, target: Tensor, source: Tensor) -> None:
        """The engine copied what is in slots `source` [N] onto `target` [N]."""
        ...

    def overwritten(self, slots: Tensor) -> None:
        """The engine wrote `slots` [N] from elsewhere."""
        ...

    def attending(self, call: AttentionCall, now: Pass) -> AbstractContextManager[Attended]:
        """Attention of one layer. Within the block what its rows read is there; after it all new tokens are stored as
        later passes read them."""
        ...

    def stored(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that attention reads in `slots` [N] from now on."""
        ...

    def status(self) -> dict[str, int]:
        """Its memory, for the banner."""
        ...


def attends_plainly(call: AttentionCall) -> None:
    """Raise UnsupportedError for a layer that plain torch over a packed cache would attend otherwise than the model."""
    if call.spec.logits_soft_cap or call.spec.window_left >= 0 or call.spec.has_sink:
        raise UnsupportedError(
            f"layer {call.layer} uses a logit cap, a sliding window or sinks: the packed cache "
            "attends to all tokens plainly; set quantizer.storage to 'simulated'"
        )


def nothing_rewritten(*_rewrite: Any) -> None:
    """Nobody asks."""
