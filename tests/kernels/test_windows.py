"""Sliding windows and logit caps under SGLang's own Triton kernels, interpreted: what they attend to is metered.

SGLang decodes over one token less than it extends over; both kinds of rows are compared with float64 attention.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")
sys.path.insert(0, str(Path(__file__).parents[1] / "sglang"))

from engine import HKV, LAYERS, Engine, attention, triton_backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from witcert_core.serving.kernel_simulated import KernelSimulated

LEFT = 7  # what SGLang makes of a window of eight tokens


@pytest.fixture(params=["kernels", "reference"])
def meter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which implementation of the meter looks on; the engine's own attention is Triton's either way."""
    if request.param == "reference":
        monkeypatch.setattr("witcert_core.serving.kernel_simulated.kernels_serve", lambda _device: False)
    return str(request.param)


def served(quantizer: str = "int4_token_group", dtype: torch.dtype = torch.float32, **options: Any) -> Engine:
    return Engine(quantizer, dtype, stock=triton_backend, **{"window": LEFT, **options})


def read_by(engine: Engine, layer: int, request: int, count: int, own: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values a row sees before any window: what is stored, the chunk's last `own` tokens exactly."""
    k, v = (x.clone() for x in engine.stored(layer, request, count))
    for x, kind in ((k, "k"), (v, "v")):
        x[count - own :] = engine.exact[layer][kind][request, count - own : count]
    return k, v


@pytest.mark.parametrize(("dtype", "cap"), [(torch.float32, 0.0), (torch.float16, 3.0)])
def test_bounds_are_over_the_tokens_that_triton_attends_to(meter: str, dtype: torch.dtype, cap: float) -> None:
    engine = served(dtype=dtype, cap=cap)
    assert isinstance(engine.runtime.cache, KernelSimulated) == (meter == "kernels")
    engine.step([5, 31], ForwardMode.EXTEND)
    for new, mode in [([1, 1], ForwardMode.DECODE), ([6, 3], ForwardMode.EXTEND), ([1, 4], ForwardMode.MIXED)]:
        decoding = mode.is_decode()
        step, queries, outputs = engine.step(new, mode)
        attended = LEFT if decoding else LEFT + 1
        assert step.rows
        for layer in range(LAYERS):
            cells = step.layers[layer]
            assert cells.num_visible.tolist() == [min(row.position + 1, attended) for row in step.rows]
            for number, row in enumerate(step.rows):
                own = 0 if decoding else row.position + 1 - (engine.lens[row.request] - new[row.request])
                k, v = (x[-attended:] for x in read_by(engine, layer, row.request, row.position + 1, own))
                exact = engine.exact[layer]["k"][row.request, : row.position + 1][-attended:]
                q = queries[layer][row.token].to(dtype).float()
                out, compressed = attention(q, k, v, cap)
                _, true = attention(q, exact, exact, cap)
                off = (outputs[layer][row.token].double() - out).abs().max()
                assert off < (4e-3 if dtype == torch.float16 else 1e-5)
                tv = (true - compressed).abs().sum(-1) / 2
                assert (tv <= cells.meter[number]).all()
                assert torch.allclose(cells.tv_audit[number], tv, atol=1e-5)


def test_a_packed_pool_attends_by_itself_over_the_models_window() -> None:
    """Its decode rows see the whole window too: ours is the kernel that attends."""
    engine = served("int8_dither", storage="packed")
    engine.step([5, 31], ForwardMode.EXTEND)
    step, queries, outputs = engine.step([1, 1], ForwardMode.DECODE)
    for i, row in enumerate(step.rows):
        k, v = (x[-(LEFT + 1) :] for x in engine.stored(0, i, row.position + 1))
        assert k.shape[1] == HKV
        assert (outputs[0][i].double() - attention(queries[0][i], k, v)[0]).abs().max() < 1e-4
    assert step.layers[0].num_visible.tolist() == [min(row.position + 1, LEFT + 1) for row in step.rows]
