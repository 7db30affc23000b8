"""SGLang's pool for layers with a window beside the full one, under its own Triton kernels, interpreted: slots that it
translates and takes again, pass by pass.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")
sys.path.insert(0, str(Path(__file__).parents[1] / "sglang"))

from engine import HQ, SCALE, Engine, triton_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from test_groups import attended, windowed_pool
from torch import Tensor
from witcert_sglang import windows
from witcert_sglang.selfcheck import check_attention

from witcert_core.errors import UnsupportedError
from witcert_core.meter.attention import AttentionSpec
from witcert_core.serving.steps import StepCells
from witcert_core.serving.storage.simulated import SimulatedStorage

WINDOW_LEFT = 7


class Windowed(Engine):
    """With what SGLang's allocator does to the slots of layers with a window: new tokens get one, and those that every
    row to come has left behind give theirs back, to whoever comes next."""

    def __init__(self, quantizer: str, **sections: Any) -> None:
        super().__init__(quantizer, make_pool=windowed_pool, window=WINDOW_LEFT, stock=triton_backend, **sections)
        self.free = list(range(1, 41))

    def step(self, new: list[int], mode: ForwardMode) -> tuple[StepCells, list[Tensor], list[Tensor]]:
        mapping, table = self.pool.full_to_swa_index_mapping, self.requests.req_to_token
        for row, prefix, count in zip(self.rows, self.lens, new, strict=True):
            gone = table[row, : max(prefix - WINDOW_LEFT, 0)].long()
            self.free = [int(slot) for slot in mapping[gone] if slot] + self.free
            mapping[gone] = 0
            mapping[table[row, prefix : prefix + count].long()] = torch.tensor([self.free.pop(0) for _ in range(count)])
        return super().step(new, mode)


@pytest.mark.parametrize(("quantizer", "reads"), [("int4_token_group", "chunk_exact"), ("int8_dither", "stored")])
def test_a_window_pool_beside_a_full_one(quantizer: str, reads: str) -> None:
    engine = Windowed(quantizer, prefill_reads=reads)
    engine.step([14, 5], ForwardMode.EXTEND)
    engine.step([6, 3], ForwardMode.EXTEND)
    metered = 0
    for _ in range(8):
        step, queries, _ = engine.step([1, 1], ForwardMode.DECODE)
        step.count(engine.runtime.ledger, {0, 1})
        for number, row in enumerate(step.rows):
            for layer, cells in step.layers.items():
                left = windows.window_left(type(engine.backend), engine.layers[layer], is_decode=True)
                spec = AttentionSpec(SCALE, window_left=left)
                exact, stored = attended(engine, layer, spec, row.request, row.position, queries[layer][row.token])
                assert (0.5 * (exact - stored).abs().sum(-1) <= cells.meter[number]).all()
                metered += HQ
    assert metered == 8 * 2 * 2 * HQ
    row = engine.requests.req_to_token[engine.rows[0], : engine.lens[0]].long()
    assert int((engine.pool.full_to_swa_index_mapping[row] == 0).sum()) > 18
    found = engine.runtime.finish("a", "stop")
    assert found["audit"]["violations"] == found["audit"]["mismatches"] == 0
    assert found["audit"]["cells"] == found["audit"]["outputs"] == 8 * 2 * HQ


def test_moves_and_loads_reach_the_group_of_their_pool() -> None:
    engine = Windowed("int4_token_group")
    assert engine.runtime.sub_pool(engine.pool.full_kv_pool) == 0
    assert engine.runtime.sub_pool(engine.pool.swa_kv_pool) == 1
    assert engine.runtime.sub_pool(engine.pool) is None
    engine.step([9, 4], ForwardMode.EXTEND)
    storages = [group.cache.storage for group in engine.runtime.groups]
    full, windowed = (storage.store for storage in storages if isinstance(storage, SimulatedStorage))
    slots = engine.requests.req_to_token[engine.rows[0], 5:9].long()
    own = engine.pool.translate_loc_from_full_to_swa(slots)
    assert windowed[0].value_radius(own).isfinite().all()
    engine.runtime.overwritten(own, 1)
    assert windowed[0].value_radius(own).isinf().all()
    assert full[1].value_radius(slots).isfinite().all()


def test_the_check_at_start_tells_the_pools_apart() -> None:
    """Triton reads each layer by its own slots; torch_native writes those with a window by them and reads by others."""
    engine = Windowed("int4_token_group")
    compared = engine.backend, engine.layers, engine.requests, engine.pool, torch.float32
    mapping = engine.pool.full_to_swa_index_mapping.clone()
    assert len(check_attention(*compared)) == 8  # with and without a window and sinks, chunks and decode steps
    assert torch.equal(engine.pool.full_to_swa_index_mapping, mapping)
    native = TorchNativeAttnBackend(engine.runner)
    with pytest.raises(UnsupportedError, match="with a window of 8 tokens are not attention over"):
        check_attention(native, engine.layers, engine.requests, engine.pool, torch.float32)
    with pytest.raises(UnsupportedError, match=r"a window in a pool of its own: .* reads by those of the other"):
        windows.check_backend(engine.layers, native)
    windows.check_backend(engine.layers, engine.backend)
