"""Requests served pass by pass over one layer of an engine's pool, by the runtime of the core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from witcert_core.meter.attention import AttentionSpec
from witcert_core.policy.model import parse_policy
from witcert_core.quantizers.rotary import RotarySpec
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.passes import RequestPass
from witcert_core.serving.runtime import Runtime
from witcert_core.serving.steps import StepCells

D, SLOTS, SCALE = 64, 64, 64**-0.5


class OneLayer:
    """One layer with one head; `asks` queries and keys can be given, else they are drawn."""

    def __init__(self, **meter: Any) -> None:
        torch.manual_seed(3)
        self.k, self.v = torch.zeros(SLOTS, 1, D), torch.zeros(SLOTS, 1, D)
        self.exact = torch.zeros(SLOTS, 1, D)
        policy = parse_policy(
            {
                "version": 1,
                "quantizer": {"name": "int8_dither"},
                "meter": {"stride": 1, "audit_every": 1, **meter},
                "prefill_reads": "stored",
            }
        )
        geometry = Geometry("test", 1, (0,), 1, 1, (0,), D, D, SLOTS, torch.float32, RotarySpec(D), "cpu")

        self.runtime = Runtime("test", policy, geometry, self, None)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.k[slots], self.v[slots]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.k[slots], self.v[slots] = k, v

    def restore(self, layer: int, slots: Tensor, head: int, k: Tensor, v: Tensor) -> None:
        raise AssertionError("nothing is repaired here")

    def step(
        self,
        rid: str,
        slots: Tensor,
        new: int,
        prefilling: bool,
        q: Tensor | None = None,
        k: Tensor | None = None,
        facts: Mapping[str, str | int] | None = None,
        committed: bool = True,
        drafts: int = 0,
        right: int = 0,
    ) -> StepCells:
        """One pass of one request, counted where it is committed."""
        own = slots[-new:]
        q = torch.randn(new, 1, D) if q is None else q.float().view(new, 1, D)
        k = torch.randn(new, 1, D) if k is None else k.float().view(new, 1, D)
        self.exact[own] = k
        self.runtime.begin([RequestPass(rid, slots, new, prefilling, True, drafts=drafts, facts=facts or {})], own)

        def run(own_k: Tensor | None, own_v: Tensor | None) -> Tensor:
            assert own_k is not None
            assert own_v is not None
            self.write(0, own, own_k, own_v)
            outs = []
            for i, mine in enumerate(q):
                keys, values = (x[slots[: slots.numel() - new + i + 1], 0] for x in (self.k, self.v))
                outs.append((mine @ keys.T * SCALE).softmax(-1) @ values)
            return torch.cat(outs)

        places = torch.arange(slots.numel() - new, slots.numel())
        self.runtime.attend(AttentionCall(0, q, k, torch.randn(new, 1, D), own, places, AttentionSpec(SCALE), run))
        step = self.runtime.end()
        assert step is not None
        step.count(self.runtime.ledger, {0} if committed else (), {0: right})
        return step

    def summary(self, rid: str) -> dict[str, Any]:
        return self.runtime.finish(rid, "stop")
