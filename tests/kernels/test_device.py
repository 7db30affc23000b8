"""The caches that kernels read, on one device: no operation around the launches mixes its tensors with the host's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pretend import DEVICE, never_waiting, pretending

from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.steps import StepCells

from . import test_serving, test_simulated
from .test_engine_cache import NarrowPool
from .two_requests import Pass

PASSES: list[Pass] = [[(9, False), (6, False)], [(1, True), (1, True)], [(1, True), (2, False)]]


def simulated(name: str, dtype: torch.dtype = torch.float16) -> Callable[..., Any]:
    return lambda device, **meter: test_simulated.Served("kernels", name, dtype, device=device, meter=meter)


def engine(device: str, **meter: Any) -> Any:
    pool = NarrowPool(torch.float8_e4m3fn, torch.float16, device)
    served = test_simulated.Served("kernels", "engine", torch.float16, pool, device=device, meter=meter)
    served.checks_outputs = False  # its chunks read what they stored, where the policy says their own exact keys
    return served


def packed(name: str, **options: Any) -> Callable[..., Any]:
    return lambda device, **meter: test_serving.Served("kernels", name, device=device, **options, **meter)


CACHES: dict[str, Callable[..., Any]] = {
    "int4_token_group": simulated("int4_token_group"),
    "int8_dither": simulated("int8_dither"),
    "engine": engine,
    "int8_dither_w packed": packed("int8_dither_w"),
    "int8_dither_bypass packed": packed("int8_dither_bypass"),
    "int8_dither packed, gated": packed("int8_dither", gate=test_serving.GATE),
    "int8_dither_bypass packed, gated": packed("int8_dither_bypass", gate=test_serving.GATE),
}


@pytest.mark.parametrize("cache", CACHES)
def test_on_one_device(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.randbits", lambda _bits: 5)  # the same dither twice
    make = CACHES[cache]

    def serve(device: str) -> list[tuple[StepCells, torch.Tensor]]:
        served = make(device)
        found = [served.step(new) for new in PASSES]
        return [(step, rest[-1].cpu()) for step, *rest in found]

    expected = serve("cpu")
    with pretending():
        found = serve(str(DEVICE))
    for (mine, out), (theirs, wanted) in zip(found, expected, strict=True):
        torch.testing.assert_close(out, wanted)
        assert (mine.rows, mine.layers.keys(), mine.lost) == (theirs.rows, theirs.layers.keys(), theirs.lost)
        for layers, others in ((mine.layers, theirs.layers), (mine.deterministic_layers, theirs.deterministic_layers)):
            for layer, cells in others.items():
                for field in ("acc", "meter", "tv_audit", "num_quantized"):
                    torch.testing.assert_close(getattr(layers[layer], field), getattr(cells, field), equal_nan=True)
                # The directions of an output bound are taken in float32 on a CPU, in float64 elsewhere.
                torch.testing.assert_close(layers[layer].out_bound, cells.out_bound, rtol=2e-3, atol=0.0)
    assert any(step.layers for step, _ in found)


UNGATED = [name for name in CACHES if not name.endswith("gated")]


@pytest.mark.parametrize("cache", UNGATED)
def test_no_layer_waits_for_the_device(cache: str) -> None:
    """Prompts, generated tokens, and both at once, without audits; outlier channels are chosen in the first pass."""
    with pretending():
        served = CACHES[cache](str(DEVICE), audit_every=0)
        attend: Callable[[AttentionCall], torch.Tensor] = served.runtime.attend

        def waiting_for_nothing(call: AttentionCall) -> torch.Tensor:
            def run(*pair: torch.Tensor | None) -> torch.Tensor:
                with never_waiting(holds=False):  # the engine's own
                    return call.run(*pair)

            with never_waiting():
                return attend(replace(call, run=run))

        served.step([(66, False), (6, False)])
        served.runtime.attend = waiting_for_nothing
        passes: list[Pass] = [[(1, True), (1, True)], [(1, True), (2, False)], [(1, True), (1, True)]]
        if cache == "engine":  # a pass with a prompt is left to torch
            del passes[1]
        assert all(served.step(new)[0].layers for new in passes)


def test_what_waits_is_noticed() -> None:
    with pretending():
        there = torch.arange(6, device=DEVICE)
        for waits in (
            lambda: bool((there > 3).any()),
            lambda: there[there > 3],
            lambda: there.cpu(),
            lambda: there.tolist(),
            lambda: torch.zeros(6, dtype=torch.int64).copy_(there),
            lambda: torch.unique(there),
        ):
            with never_waiting(), pytest.raises(RuntimeError, match="waits for the device"):
                waits()
            waits()
