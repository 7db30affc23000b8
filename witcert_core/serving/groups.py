"""Cache groups: layers of one shape that keep a token in the same slot, and everything that is remembered by slot.

An engine with one pool for all layers has one group. Layers with a sliding window may have a pool of their own, and an
engine may split the layers of a model over several page tables: the tokens of a pass are then in other slots for each
group, and its rows are the same for all. Layers of another shape (KV heads, channels of keys or values) are a group of
their own as well, though their tokens may be in the same slots.

Shapes: SLOTS slots of the group, S tokens of a request, N new tokens of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.cache.protocols import Pool
from witcert_core.errors import UnsupportedError
from witcert_core.policy.model import Policy
from witcert_core.quantizers.dither import DitherKey
from witcert_core.serving.build import Buffers, build_cache
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.encoder import Encoder, Tables
from witcert_core.serving.forward import Pass
from witcert_core.serving.generated import GeneratedSlots
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.passes import RowPlan
from witcert_core.serving.storage.attended import Rewritten


@dataclass(frozen=True)
class GroupSlots:
    """Where the tokens of a pass are in one group: of request i all of them, requests[i] [S_i] int64 in order of
    position, and written [N], where the new ones of all requests go.

    A token that has left the group's windows is in one of its null slots (`Geometry.null_slots`).
    """

    requests: Sequence[Tensor]
    written: Tensor


class CacheGroup:
    """One group: its cache, and by slot which pass wrote it and whether it holds a sampled token."""

    def __init__(
        self,
        policy: Policy,
        geometry: Geometry,
        pool: Pool | Buffers,
        dither_key: DitherKey,
        tables: Tables | None,
        rewritten: Rewritten,
    ) -> None:
        self.geometry = geometry
        self.pass_ids = torch.zeros(geometry.num_slots, dtype=torch.int64, device=geometry.device)  # 0: never written
        dithered = policy.tier == "probabilistic"
        self.generated = GeneratedSlots(geometry.num_slots, geometry.device) if dithered else None
        self.encoder = Encoder(policy.resolved_quantizer, geometry, self.pass_ids, dither_key, tables)
        self.cache = build_cache(of_layers(policy, geometry.layers), geometry, pool, self.encoder, rewritten)
        self.now: Pass | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of what is remembered of slots whatever the cache."""
        return self.pass_ids.nbytes + (0 if self.generated is None else self.generated.nbytes)

    def written(self, slots: Tensor, plan: RowPlan, pass_id: int) -> None:
        """Pass `pass_id` is about to write `slots` [N]."""
        self.pass_ids[slots] = pass_id
        if self.generated is not None:
            self.generated.written(slots, plan.new_tokens, plan.generated)

    def holds_sampled(self, slots: Tensor) -> bool:
        """Whether some of `slots` [N] hold a sampled token. Null slots never do: what has left the windows was sampled
        before the keys that are left had a dither."""
        return self.generated is not None and self.generated.among(slots)

    def begin(self, now: Pass) -> None:
        self.cache.begin_pass(now)
        self.now = now

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention of one layer of the group in the pass that began; UnsupportedError outside one."""
        if self.now is None:
            raise UnsupportedError(f"layer {call.layer} attends outside a pass that was announced")
        return self.cache.attend(call, self.now)

    def moved(self, target: Tensor, source: Tensor) -> None:
        """The engine copied what is in slots `source` [N] onto `target` [N]."""
        self.cache.storage.moved(target, source)
        if self.generated is not None:
            self.generated.moved(target, source)

    def overwritten(self, slots: Tensor) -> None:
        """The engine wrote `slots` [N] from elsewhere."""
        self.cache.storage.overwritten(slots)
        if self.generated is not None:
            self.generated.overwritten(slots)


def of_layers(policy: Policy, layers: Sequence[int]) -> Policy:
    """The policy as far as it speaks of these layers of a model."""
    quantizer, meter = (
        part.model_copy(
            update={"layers": None if part.layers is None else tuple(x for x in part.layers if x in layers)}
        )
        for part in (policy.quantizer, policy.meter)
    )
    return policy.model_copy(update={"quantizer": quantizer, "meter": meter})
