"""The engine's own fp8 cache, with its generated tokens metered by the `certify` kernel over the page table.

The engine attends with its own kernel over fp8 keys and values, which `certify` reads as they lie in the pool. Only for
kernels that turn both into the queries' 16-bit dtype and keep the weights in it: rounded to fp8, weights lose more than
any radius here allows for. A pass with prompt tokens, whose chunks read themselves exactly, is left to the reference.
"""

from __future__ import annotations

from torch import Tensor

from witcert_core.policy.model import Policy
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.device.simulated import KernelSimulated, PagedPool, by_certify
from witcert_core.serving.encoder import Encoder
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.passes import RowPlan
from witcert_core.serving.steps import StepCells
from witcert_core.serving.storage.engine import EngineCache


class KernelEngine(KernelSimulated, EngineCache):
    """`EngineCache` with passes of generated tokens measured on the device. The pool must have no scales."""

    def _measure_read(
        self, call: AttentionCall, plan: RowPlan, step: StepCells, deltas: list[float], out: Tensor
    ) -> None:
        if call.alike:
            self._measure(call, plan, step, deltas, out)
        else:
            super()._measure_read(call, plan, step, deltas, out)


def engine_cache(policy: Policy, geometry: Geometry, pool: PagedPool, encoder: Encoder) -> EngineCache:
    """The metered engine's own cache of this device."""
    if by_certify(policy, geometry, encoder, pool):
        return KernelEngine(policy, geometry, pool, encoder)
    return EngineCache(policy, geometry, pool, encoder)
