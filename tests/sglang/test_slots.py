"""Slots that hold no token of a request, the padding row 0 among them, are neither read nor metered."""

from __future__ import annotations

import pytest
import torch
from engine import LAYERS, Engine, gated
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from witcert_core.serving.steps import StepCells

pytestmark = pytest.mark.sglang


def poison(engine: Engine) -> None:
    """Make everything outside the requests' own slots not a number, unknown, or a code beyond use."""
    used = torch.cat([engine.requests.req_to_token[row, :60] for row in engine.rows]).long()
    rest = torch.ones(engine.runtime.geometry.num_slots, dtype=torch.bool)
    rest[used] = False
    assert rest[0]
    pool = engine.pool
    scales = [*(pool.k_scale_buffer or []), *(pool.v_scale_buffer or [])]
    for buffer in [*pool.k_buffer, *pool.v_buffer, *scales]:
        buffer[rest] = float("nan") if buffer.dtype.is_floating_point else -128
    if engine.runtime.policy.quantizer.storage == "simulated":
        for layer in range(LAYERS):
            for tensor in engine.simulated.store[layer].tensors():
                tensor[rest] = float("nan") if tensor.dtype.is_floating_point else 255
    else:
        for exact in engine.packed.exact_k.values():
            exact[rest] = float("nan")


def run(name: str, storage: str, gate: bool, poisoned: bool) -> tuple[StepCells, list[torch.Tensor]]:
    engine = gated(name, storage=storage, tau=0.1) if gate else Engine(name, storage=storage)
    if poisoned:
        poison(engine)
    engine.step([7, 31], ForwardMode.EXTEND)
    if poisoned:
        poison(engine)
    engine.step([1, 9], ForwardMode.MIXED)
    step, _, outputs = engine.step([1, 1], ForwardMode.DECODE)
    return step, outputs


@pytest.mark.parametrize("gate", [False, True], ids=["observe", "certified"])
@pytest.mark.parametrize(
    ("name", "storage"),
    [("int4_token_group", "simulated"), ("int8_dither_w", "simulated"), ("int8_dither_w", "packed")],
)
def test_what_lies_in_unused_slots_changes_nothing(
    name: str, storage: str, gate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.randbits", lambda _bits: 7)  # the same dither in both runs
    (clean, clean_out), (dirty, dirty_out) = (run(name, storage, gate, poisoned) for poisoned in (False, True))
    for layer in range(LAYERS):
        for field in ("meter", "log_a", "out_bound", "out_norm", "tv_audit"):
            ours, theirs = getattr(dirty.layers[layer], field), getattr(clean.layers[layer], field)
            assert torch.equal(ours, theirs), field
            assert theirs.isfinite().all(), field
    assert all(torch.equal(a, b) for a, b in zip(clean_out, dirty_out, strict=True))


def test_no_row_reads_the_padding_slot() -> None:
    engine = Engine("int8_token_group")
    for new, mode in (([7, 31], ForwardMode.EXTEND), ([1, 9], ForwardMode.MIXED), ([1, 1], ForwardMode.DECODE)):
        step, _, _ = engine.step(new, mode)
        for row in step.rows:
            slots = engine.requests.req_to_token[engine.rows[row.request], : row.position + 1]
            assert (slots > 0).all()
    store = engine.simulated.store
    assert all((tensor[0] == 255).all() for layer in range(LAYERS) for tensor in store[layer].tensors())
