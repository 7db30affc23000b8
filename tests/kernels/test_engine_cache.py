"""An fp8 cache that the engine writes itself, as FlashInfer reads it: generated tokens by `certify`, chunks by the
reference meter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from audits import audit_of
from torch import Tensor

from witcert_core.meter.tv import attention_logits, softmax_with_sink, total_variation

from .test_simulated import HKV, HQ, LAYER, SCALE, SLOTS, D, PlainPool, Served
from .two_requests import Pass

pytestmark = pytest.mark.usefixtures("kernels")

DECODE: Pass = [(1, True), (1, True)]


class NarrowPool(PlainPool):
    """Keys and values in 8 bit; what attention makes of them is in the model's dtype."""

    def __init__(self, narrow: torch.dtype, dtype: torch.dtype, device: str = "cpu") -> None:
        self.k, self.v = (torch.full((SLOTS, HKV, D), float("nan"), device=device).to(narrow) for _ in "kv")
        self.dtype = dtype

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (x.view(torch.uint8)[slots].view(x.dtype).to(self.dtype) for x in (self.k, self.v))
        return k, v

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        for kept, given in ((self.k, k), (self.v, v)):
            kept.view(torch.uint8)[slots] = given.to(kept.dtype).view(torch.uint8)


def served(who: str, narrow: torch.dtype, dtype: torch.dtype = torch.float16, **sections: Any) -> Served:
    engine = Served(who, "engine", dtype, NarrowPool(narrow, dtype), **sections)
    engine.checks_outputs = False  # its chunks read what they stored, where the policy says their own exact keys
    return engine


@pytest.mark.parametrize("narrow", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_generated_tokens_are_certified_over_the_engines_own_pages(narrow: torch.dtype, dtype: torch.dtype) -> None:
    ours, theirs = (served(who, narrow, dtype) for who in ("kernels", "torch"))
    passes: list[Pass] = [[(40, False), (13, False)], DECODE, [(1, False), (3, False)], DECODE]
    for new in passes:
        (mine, _), (other, _) = ours.step(new), theirs.step(new)
        assert (mine.rows, mine.layers.keys()) == (other.rows, other.layers.keys())
        if not mine.layers:
            continue
        cells, reference = mine.layers[LAYER], other.layers[LAYER]
        by_kernel = new is DECODE
        assert cells.acc.dtype == (torch.float32 if by_kernel else torch.float64)
        assert torch.allclose(cells.meter, reference.meter, rtol=2e-2, atol=1e-2)
        assert torch.allclose(audit_of(cells), audit_of(reference), atol=1e-9)
        assert (audit_of(cells) <= cells.meter).all()
        assert torch.equal(cells.num_visible, reference.num_visible)
        assert (cells.out_bound >= reference.out_bound * 0.5).all()
        if not by_kernel:  # the same meter over norms that the kernel rounds up a little further
            assert (cells.meter >= reference.meter - 1e-6).all()
        for found in (cells, reference):
            assert found.excess is not None
            assert bool((found.excess[-1] > 0).any()) != by_kernel
    assert (cells.meter < 1).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_no_weights_of_such_a_kernel_pass_the_bound(dtype: torch.dtype) -> None:
    """Weights as FlashInfer's FA2 kernels make them of fp8 keys: unnormalised, rounded to 16 bit, then divided by
    the sum of the rounded ones; bfloat16 is the coarser of its two dtypes."""
    engine = served("kernels", torch.float8_e4m3fn, dtype)
    exact: dict[str, Tensor] = {}
    plain = engine.pool.write

    def spying(layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        exact.setdefault("k", torch.zeros(SLOTS, HKV, D))[slots] = k.float()
        plain(layer, slots, k, v)

    engine.pool.write = spying  # type: ignore[method-assign]
    rows: list[Tensor] = []
    attend = engine.attend

    def asked(q: Tensor, request: int, position: int, **options: Any) -> Tensor:
        rows.append(q)
        return attend(q, request, position, **options)

    engine.attend = asked  # type: ignore[method-assign, assignment]
    engine.step([(40, False), (60, False)])
    worst = 0.0
    for _ in range(4):
        rows.clear()
        step, _ = engine.step(DECODE)
        for i, q in enumerate(rows):
            slots = engine.requests.slots[i, : engine.requests.lens[i]]
            stored, _ = engine.pool.read(LAYER, slots)
            logits = attention_logits(q.float(), stored.float(), SCALE, 0.0)
            weights = (logits - logits.amax(-1, keepdim=True)).exp().bfloat16().float()
            weights = weights / weights.sum(-1, keepdim=True)
            truth = softmax_with_sink(attention_logits(q.double(), exact["k"][slots].double(), SCALE, 0.0), None)
            tv = total_variation(truth, weights)
            assert (tv <= step.layers[LAYER].meter[i]).all()
            worst = max(worst, float(tv.max()))
    assert worst > 0.02


def test_a_slot_the_engine_wrote_from_elsewhere_is_unknown() -> None:
    engine = served("kernels", torch.float8_e5m2)
    engine.step([(9, False), (14, False)])
    engine.runtime.moved(engine.requests.slots[0, :3], engine.requests.slots[1, :3])
    step, _ = engine.step(DECODE)
    cells = step.layers[LAYER]
    assert (cells.meter[0] == 1).all()
    assert (cells.meter[1] < 1).any()
    assert cells.meter.shape == (2, HQ)


def test_what_certify_does_not_know_is_left_to_the_reference() -> None:
    for meter in ({"sketch_bits": 4}, {"form": "extremal"}):
        engine = served("kernels", torch.float8_e4m3fn, meter=meter)
        engine.step([(9, False), (14, False)])
        step, _ = engine.step(DECODE)
        assert step.layers[LAYER].acc.dtype == torch.float64
