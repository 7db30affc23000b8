"""When tokens are quantized: which slots of a request still hold exact keys and values, and which are ready.

A token is *pending* while the cache holds it exactly (radius 0); it is quantized once, for all layers in the same pass.
Quantizers of single tokens take every token as it is written; for the others a token waits until it is *ready*: its
group is complete, it is no longer among the newest, and the request's calibration is there.

Shapes: SLOTS slots of the engine's pool, M tokens ready.

Sharing. What a quantized group holds follows from its own tokens and, for a calibrated quantizer, from the first
`calibration_tokens` of the request. Requests may therefore share slots in whole units of `sharing_unit` tokens from the
start: then every group, and the calibration, belongs to all of them alike, and it does not matter whose progress makes
it ready. Shared slots that still are pending are quantized once, by the first request that gets far enough. A group of
which some slots are quantized belongs to requests that parted inside it; there is no consistent way to quantize it, so
it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from witcert_core.errors import UnsupportedError
from witcert_core.quantizers.base import Kind, Quantizer

States = dict[tuple[int, Kind], Tensor]


@dataclass(frozen=True)
class QuantizeSchedule:
    """How many tokens of a request are quantized, from its length alone."""

    token_group: int = 1
    recent_tokens: int = 0
    calibration_tokens: int = 0

    @classmethod
    def of(cls, quantizer: Quantizer) -> QuantizeSchedule:
        return cls(quantizer.token_group, quantizer.recent_tokens, quantizer.calibration_tokens)

    @property
    def immediate(self) -> bool:
        """Whether every token is quantized as it is written."""
        return self == QuantizeSchedule()

    @property
    def sharing_unit(self) -> int:
        """Requests may share their first tokens in multiples of this."""
        return math.lcm(self.token_group, max(self.calibration_tokens, 1))

    def num_quantized(self, length: int) -> int:
        """How many of the first tokens of a request of `length` tokens are quantized; always whole groups."""
        if length < self.calibration_tokens:
            return 0
        return max(length - self.recent_tokens, 0) // self.token_group * self.token_group

    def passes(self, length: int, new: int) -> list[int]:
        """How `new` tokens after the first `length` may be fed in: how many in each pass.

        As few passes as let every token read what it would read if it were written alone. A token reads those of its
        pass as they are once all of them are written, and what more is ready by then is quantized too early for it.
        """
        sizes: list[int] = []
        waiting: int | None = None  # quantized tokens of a row of this pass that also reads pending ones
        for count in range(length + 1, length + new + 1):
            quantized = self.num_quantized(count)
            if not sizes or waiting not in (None, quantized):
                sizes.append(0)
                waiting = None
            sizes[-1] += 1
            waiting = quantized if quantized < count else waiting
        return sizes

    def describe(self) -> str:
        """When tokens are quantized, for people."""
        waits = []
        if self.token_group > 1:
            waits.append(f"in groups of {self.token_group} tokens")
        if self.recent_tokens:
            waits.append(f"once {self.recent_tokens} newer ones are there")
        if self.calibration_tokens:
            waits.append(f"after a calibration on the first {self.calibration_tokens}")
        return f"{', '.join(waits)}; exact until then" if waits else "as they are written"

    def waits_for(self) -> str:
        """What keeps tokens exact for a while, '' if every token is quantized as it is written."""
        waits = []
        if self.calibration_tokens:
            waits.append(f"calibrates on the first {self.calibration_tokens} tokens")
        if self.token_group > 1:
            waits.append(f"closes groups of {self.token_group} tokens")
        if self.recent_tokens:
            waits.append(f"keeps the newest {self.recent_tokens} exact")
        return " and ".join([", ".join(waits[:-1]), waits[-1]] if len(waits) > 1 else waits)

    def may_share(self, unit: int) -> bool:
        """Whether requests can share prefixes in units of `unit` tokens without one of them ending inside a group."""
        return unit % self.sharing_unit == 0


@dataclass(frozen=True)
class ReadyTokens:
    """Tokens to be quantized in this pass, whole groups one after the other.

    slots, positions [M] int64; requests [M]: the index of the request that made each ready. anchors: for a calibrated
    quantizer the slot that owns each token's state, [M], else [0].
    calibrating: anchor -> slots [calibration_tokens] of a request whose state is still to be made.
    """

    slots: Tensor
    positions: Tensor
    requests: Tensor
    anchors: Tensor
    calibrating: dict[int, Tensor] = field(default_factory=dict)

    def of(self, chosen: Tensor) -> ReadyTokens:
        """The tokens of the `chosen` requests, [REQUESTS] bool."""
        mine = chosen[self.requests]
        anchors = self.anchors[mine] if self.anchors.numel() else self.anchors
        return replace(
            self, slots=self.slots[mine], positions=self.positions[mine], requests=self.requests[mine], anchors=anchors
        )


class PendingTokens:
    """Which slots are quantized, and the calibrated states; one per rank, for all layers.

    The state of a request is kept under its *anchor*, the slot of its token `calibration_tokens` - 1. That slot stands
    for the tokens before it as well, so requests that share the calibrated prefix find the same state; it is dropped
    when the slot is written again.
    """

    def __init__(self, rule: QuantizeSchedule, num_slots: int, device: str | torch.device = "cpu") -> None:
        self.rule = rule
        self.quantized = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self._is_anchor = torch.zeros(num_slots, dtype=torch.bool)
        self._states: dict[int, States] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the flags; states are a few numbers per head and request."""
        return self.quantized.nbytes

    @property
    def num_states(self) -> int:
        return len(self._states)

    def written(self, slots: Tensor) -> None:
        """New tokens go into `slots` [N]: they are pending, and what their slots stood for is gone."""
        self.quantized[slots] = False
        self._drop(slots)

    def moved(self, target: Tensor, source: Tensor) -> None:
        """The engine copied slots `source` [N] onto `target` [N]."""
        self.quantized[target] = self.quantized[source]
        states = [self._states.get(slot) for slot in source.tolist()]
        self._drop(target)
        for slot, state in zip(target.tolist(), states, strict=True):
            if state is not None:
                self._states[slot] = state
                self._is_anchor[slot] = True

    def overwritten(self, slots: Tensor) -> None:
        """Something unknown is in `slots` [N]: it counts as quantized, nothing in it is exact."""
        self.quantized[slots] = True
        self._drop(slots)

    def ready(self, requests: Sequence[Tensor]) -> ReadyTokens:
        """What is ready, and quantized from now on, of requests with slots [LENGTH] each, those of new tokens included.

        Raises UnsupportedError for a group that is quantized in part, and for a request whose state is gone.
        """
        slots: list[Tensor] = []
        positions: list[Tensor] = []
        owners: list[Tensor] = []
        anchors: list[Tensor] = []
        calibrating: dict[int, Tensor] = {}
        for index, request in enumerate(requests):
            end = self.rule.num_quantized(request.numel())
            wanted = (~self.quantized[request[:end]]).nonzero().flatten()
            if not wanted.numel():
                continue
            self._check_whole(wanted)
            mine = request[wanted]
            self.quantized[mine] = True  # at once: another request of this pass may share these slots
            slots.append(mine)
            positions.append(wanted)
            owners.append(torch.full_like(wanted, index))
            if self.rule.calibration_tokens:
                prefix = request[: self.rule.calibration_tokens]
                anchor = int(prefix[-1])
                anchors.append(torch.full_like(wanted, anchor))
                if anchor not in self._states:
                    self._check_calibrates(wanted)
                    calibrating[anchor] = prefix
                    self._states[anchor] = {}
                    self._is_anchor[anchor] = True
        none = torch.zeros(0, dtype=torch.int64, device=self.quantized.device)
        return ReadyTokens(
            torch.cat([none, *slots]),
            torch.cat([none, *positions]),
            torch.cat([none, *owners]),
            torch.cat([none, *anchors]),
            calibrating,
        )

    def without_state(self, anchors: Tensor, layer: int, last: Kind) -> list[int]:
        """Those of the anchors [M] whose state is not made yet for `layer`; last: the kind it is made of last."""
        return [anchor for anchor in torch.unique(anchors).tolist() if (layer, last) not in self._states[anchor]]

    def set_state(self, anchor: int, layer: int, kind: Kind, state: Tensor) -> None:
        """Keep the state [H, W] of a request for one layer and kind."""
        self._states[anchor][layer, kind] = state

    def state(self, anchors: Tensor, layer: int, kind: Kind) -> Tensor:
        """The states [M, H, W] of tokens by their anchors [M]."""
        distinct, which = torch.unique(anchors, return_inverse=True)
        return torch.stack([self._states[anchor][layer, kind] for anchor in distinct.tolist()])[which]

    def _drop(self, slots: Tensor) -> None:
        on_host = slots.to(self._is_anchor.device, torch.int64)
        for slot in on_host[self._is_anchor[on_host]].tolist():
            self._states.pop(slot, None)
            self._is_anchor[slot] = False

    def _check_whole(self, positions: Tensor) -> None:
        """`positions` are those of pending tokens: they must be whole groups."""
        size = self.rule.token_group
        _, counts = torch.unique(positions // size, return_counts=True)
        if bool((counts != size).any()):
            raise UnsupportedError(
                f"a group of {size} tokens is quantized in part already: requests share slots inside a group; let the "
                f"engine share prefixes in units of {self.rule.sharing_unit} tokens only"
            )

    def _check_calibrates(self, positions: Tensor) -> None:
        """The first tokens, on which a new state is made, must still be exact."""
        first = self.rule.token_group
        if positions[:first].tolist() != list(range(first)):
            raise UnsupportedError(
                f"the calibration over a request's first {self.rule.calibration_tokens} tokens is gone while they are "
                f"in use: let the engine share prefixes in units of {self.rule.sharing_unit} tokens only"
            )
