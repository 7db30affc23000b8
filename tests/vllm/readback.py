"""Is what the meter reads what attention reads? Every output is computed again from the pool and compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from witcert_vllm.runtime import VllmRuntime

from witcert_core.serving.calls import AttentionCall


def attention(q: Tensor, k: Tensor, v: Tensor, sm_scale: float) -> Tensor:
    """Output [H, Dv] of one query [H, D] over k, v [S, Hkv, D], in float64."""
    k, v = (x.double().repeat_interleave(q.shape[0] // k.shape[1], 1) for x in (k, v))
    weights = (torch.einsum("hd,shd->hs", q.double(), k) * sm_scale).softmax(-1)
    return torch.einsum("hs,shd->hd", weights, v)


@contextmanager
def compared_outputs() -> Iterator[list[float]]:
    """Largest difference of each attention call's last rows, one per request, from attention over the pool."""
    found: list[float] = []
    original = VllmRuntime.attend

    def attend(runtime: VllmRuntime, call: AttentionCall) -> Tensor:
        out = original(runtime, call)
        assert runtime.now is not None
        token = -1
        for slots, new in zip(runtime.now.plan.requests, runtime.now.plan.new_tokens, strict=True):
            token += new
            k, v = runtime.groups[0].cache.storage.stored(call.layer, slots)
            expected = attention(call.q[token], k, v, call.spec.sm_scale)
            found.append(float((out.view(call.q.shape)[token].double() - expected).abs().max()))
        return out

    VllmRuntime.attend = attend  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        VllmRuntime.attend = original  # type: ignore[method-assign]
