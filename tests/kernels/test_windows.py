"""Sliding windows and logit caps under SGLang's own Triton kernels, interpreted: what they attend to is metered.

SGLang decodes over one token less than it extends over; both kinds of rows are compared with float64 attention.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from audits import audit_of

pytest.importorskip("sglang")
sys.path.insert(0, str(Path(__file__).parents[1] / "sglang"))

from engine import HKV, LAYERS, Engine, triton_backend
from layer_pool import attention
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from witcert_sglang import windows
from witcert_sglang.selfcheck import check_attention

from witcert_core.errors import UnsupportedError
from witcert_core.serving.device.certify import KernelSums
from witcert_core.serving.storage.acts import Observing

LEFT = 7  # what SGLang makes of a window of eight tokens


@pytest.fixture(params=["kernels", "reference"])
def meter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which implementation of the meter looks on; the engine's own attention is Triton's either way."""
    if request.param == "reference":
        monkeypatch.setattr("witcert_core.serving.build.without_kernels", lambda *_: "a test")
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
    acts = engine.runtime.groups[0].cache.acts
    assert isinstance(acts, Observing)
    assert isinstance(acts.summer, KernelSums) == (meter == "kernels")
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
                out, compressed = attention(q, k, v, cap=cap)
                _, true = attention(q, exact, exact, cap=cap)
                off = (outputs[layer][row.token].double() - out).abs().max()
                assert off < (4e-3 if dtype == torch.float16 else 1e-5)
                tv = (true - compressed).abs().sum(-1) / 2
                assert (tv <= cells.meter[number]).all()
                assert torch.allclose(audit_of(cells)[number], tv, atol=1e-5)
                assert cells.excess is not None
                assert (cells.excess[number] <= 0).all()


def test_the_window_that_is_not_attended_to_is_a_mismatch_that_true_tv_cannot_show(
    meter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode rows metered over the whole window, as SGLang's configuration has it: one token too many."""
    monkeypatch.setitem(windows.CONVENTIONS, "TritonAttnBackend", windows.Convention(decode_less=0))
    engine = served()
    engine.checks_outputs = False
    engine.step([5, 31], ForwardMode.EXTEND)
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    for cells in step.layers.values():
        assert (audit_of(cells) <= cells.meter).all()
        assert cells.excess is not None
        assert (cells.excess[0] <= 0).all()  # six tokens: all of them are within either window
        assert (cells.excess[1] > 0).any()


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


KINDS = [(-1, 0.0), (LEFT, 0.0), (40, 2.0)]


@pytest.mark.parametrize(("window", "cap"), KINDS)
def test_the_check_at_start_passes_over_sglangs_own_backends_and_leaves_the_pool_alone(window: int, cap: float) -> None:
    """Under the interpreter Triton's, with sinks too; both backends beside each other as a server may have them."""
    for stock in (triton_backend, TorchNativeAttnBackend)[: 1 if cap else 2]:
        engine = Engine("none", torch.float16, stock=stock, window=window, cap=cap)
        before = [x.clone() for x in (*engine.pool.k_buffer, *engine.pool.v_buffer, engine.requests.req_to_token)]
        said = check_attention(engine.backend, engine.layers, engine.requests, engine.pool, torch.float16)
        assert len(said) == (4 if stock is triton_backend else 2)
        assert ("a window of" in said[0]) == (window >= 0)
        after = (*engine.pool.k_buffer, *engine.pool.v_buffer, engine.requests.req_to_token)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("window", [LEFT, 40])
def test_the_check_at_start_names_the_backend_and_the_kind_of_pass(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the window that decode steps do not attend to, they fail it; prompt chunks would with another one."""
    engine = Engine("none", torch.float16, stock=triton_backend, window=window)
    monkeypatch.setitem(windows.CONVENTIONS, "TritonAttnBackend", windows.Convention(decode_less=0))
    with pytest.raises(UnsupportedError, match=f"decode steps of TritonAttnBackend with a window of {window + 1}"):
        check_attention(engine.backend, engine.layers, engine.requests, engine.pool, torch.float16)
    engine = Engine("none", torch.float16, window=window)
    engine.layers[0].scaling *= 1.1
    attend = engine.backend.forward_extend

    def other_scale(*args: Any, **kwargs: Any) -> torch.Tensor:
        engine.layers[0].scaling /= 1.1
        try:
            served: torch.Tensor = attend(*args, **kwargs)
            return served
        finally:
            engine.layers[0].scaling *= 1.1

    monkeypatch.setattr(engine.backend, "forward_extend", other_scale)
    with pytest.raises(UnsupportedError, match="prompt chunks of TorchNativeAttnBackend"):
        check_attention(engine.backend, engine.layers, engine.requests, engine.pool, torch.float16)
