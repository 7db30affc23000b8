"""The caches that kernels read, on one device: no operation around the launches mixes its tensors with the host's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pretend import DEVICE, pretending

from witcert_core.serving.device.engine import KernelEngine, engine_cache
from witcert_core.serving.device.packed import KernelPacked, packed_storage
from witcert_core.serving.device.simulated import KernelSimulated, simulated_cache
from witcert_core.serving.steps import StepCells
from witcert_core.serving.storage.packed import PackedStorage

from . import test_serving, test_simulated
from .test_engine_cache import NarrowPool
from .two_requests import Pass

PASSES: list[Pass] = [[(9, False), (6, False)], [(1, True), (1, True)], [(1, True), (2, False)]]


def simulated(name: str, dtype: torch.dtype = torch.float16) -> Callable[[str], Any]:
    return lambda device: test_simulated.Served(simulated_cache, name, dtype, device=device)


def engine(device: str) -> Any:
    pool = NarrowPool(torch.float8_e4m3fn, torch.float16, device)
    served = test_simulated.Served(engine_cache, "engine", torch.float16, pool, device=device)
    served.checks_outputs = False  # its chunks read what they stored, where the policy says their own exact keys
    return served


def packed(name: str, **options: Any) -> Callable[[str], Any]:
    return lambda device: test_serving.Served(packed_storage, name, device=device, **options)


CACHES: dict[str, tuple[type[Any], Callable[[str], Any]]] = {
    "int4_token_group": (KernelSimulated, simulated("int4_token_group")),
    "int8_dither": (KernelSimulated, simulated("int8_dither")),
    "engine": (KernelEngine, engine),
    "int8_dither_w packed": (KernelPacked, packed("int8_dither_w")),
    "int8_dither_bypass packed": (KernelPacked, packed("int8_dither_bypass")),
    "int8_dither packed, gated": (PackedStorage, packed("int8_dither", gate=test_serving.GATE)),
    "int8_dither_bypass packed, gated": (PackedStorage, packed("int8_dither_bypass", gate=test_serving.GATE)),
}


@pytest.mark.parametrize("cache", CACHES)
def test_on_one_device(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.randbits", lambda _bits: 5)  # the same dither twice
    kind, make = CACHES[cache]

    def serve(device: str) -> list[tuple[StepCells, torch.Tensor]]:
        served = make(device)
        assert type(served.runtime.cache) is kind
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
