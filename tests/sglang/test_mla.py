"""Multi-head latent attention in SGLang: its own pool and layers pass by pass, and a server of a tiny checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import write_policy
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import Tensor
from witcert_demo.servers import running_server
from witcert_sglang.backend import metered
from witcert_sglang.geometry import read_geometry
from witcert_sglang.memory import side_bytes_per_token
from witcert_sglang.refusals.worker import check_layers
from witcert_sglang.runtime import SglangRuntime
from witcert_sglang.selfcheck import check_attention
from witcert_sglang.sub_pools import sub_pools

from tests.zoo.families import make_checkpoint
from witcert_core.errors import UnsupportedError
from witcert_core.policy.model import parse_policy
from witcert_core.serving.steps import StepCells

pytestmark = pytest.mark.sglang

LATENT, ROPE, NOPE, HEADS, LAYERS, SLOTS = 64, 16, 8, 4, 2, 120
WIDTH = LATENT + ROPE
SCALE = 1.3 * (NOPE + ROPE) ** -0.5
ABSORBED = Path(__file__).with_name("absorbed")


class OwnChunks(TorchNativeAttnBackend):  # type: ignore[misc]
    """`torch_native`, with first chunks over their own keys and values of heads, as other backends have them."""

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        if layer.qk_head_dim == WIDTH:
            out: Tensor = super().forward_extend(q, k, v, layer, batch, save_kv_cache=save_kv_cache)
            return out
        assert not save_kv_cache
        q, k, v = (x.view(len(q), HEADS, -1).transpose(0, 1) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scaling)
        return out.transpose(0, 1).flatten(1)


class LatentEngine:
    """One request over SGLang's own pool of latents; `absorbed` says how its first chunks attend."""

    def __init__(self, quantizer: str, absorbed: bool, **sections: Any) -> None:
        meter = {"stride": 1, "audit_every": 1, "max_rows": 64}
        policy = parse_policy({"version": 1, "quantizer": {"name": quantizer}, "meter": meter, **sections})
        self.absorbed = absorbed
        self.requests = ReqToTokenPool(size=4, max_context_len=64, device="cpu", enable_memory_saver=False)
        self.pool = MLATokenToKVPool(SLOTS, 1, torch.float32, LATENT, ROPE, LAYERS, "cpu", False, dcp_replicated=True)
        config = SimpleNamespace(
            num_attention_heads=HEADS, head_dim=256, v_head_dim=NOPE, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE
        )
        self.runner = SimpleNamespace(
            device="cpu", req_to_token_pool=self.requests, token_to_kv_pool=self.pool, model_config=config
        )
        self.backend = OwnChunks(self.runner)
        (sub,) = sub_pools(self.pool)
        geometry = read_geometry(self.runner, self.backend, sub, window=-1)
        self.runtime = SglangRuntime(policy, geometry, self.pool, None)
        kvc = SimpleNamespace(model_config=config, use_mla_backend=True, kv_cache_dtype=torch.float32)
        (group,) = self.runtime.groups
        found = group.cache.storage.bytes_side + group.pass_ids.nbytes
        assert found == side_bytes_per_token(policy, kvc, LAYERS) * geometry.num_slots
        self.mqa = [
            RadixAttention(HEADS, WIDTH, SCALE, num_kv_heads=1, layer_id=i, v_head_dim=LATENT) for i in range(LAYERS)
        ]
        self.mha = [RadixAttention(HEADS, NOPE + ROPE, SCALE, num_kv_heads=HEADS, layer_id=i) for i in range(LAYERS)]
        model = torch.nn.ModuleList([*self.mqa, *self.mha])
        assert check_layers(model, self.pool) == self.mqa
        compared = check_attention(self.backend, self.mqa, self.requests, self.pool, torch.float32)
        assert len(compared) == 2
        self.backend.__class__ = metered(type(self.backend))  # type: ignore[arg-type]
        self.backend.witcert_runtime = self.runtime
        (self.row,) = self.requests.alloc_rows(1)
        self.slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))[:60] + 1
        self.requests.req_to_token[self.row, :60] = self.slots.int()
        self.draws = torch.Generator().manual_seed(2)
        self.exact = torch.randn(LAYERS, 60, WIDTH, generator=self.draws)
        self.queries = torch.randn(LAYERS, 60, HEADS, WIDTH, generator=self.draws) * 1.5
        self.length = 0

    def step(self, new: int) -> StepCells:
        """The next tokens of the request; audited rows are compared in float64."""
        first, self.length = self.length, self.length + new
        mode = ForwardMode.DECODE if new == 1 and first else ForwardMode.EXTEND
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=1,
            input_ids=torch.zeros(new, dtype=torch.int64),
            req_pool_indices=torch.tensor([self.row]),
            seq_lens=torch.tensor([self.length]),
            out_cache_loc=self.slots[first : self.length],
            seq_lens_sum=self.length,
            rids=["r"],
        )
        batch.positions = torch.arange(first, self.length)
        if not mode.is_decode():
            batch.extend_seq_lens, batch.extend_prefix_lens = torch.tensor([new]), torch.tensor([first])

        def model(_runner: Any, forward_batch: ForwardBatch) -> Any:
            self.backend.init_forward_metadata(forward_batch)
            for number in range(LAYERS):
                rows = self.exact[number, first : self.length, None]
                if mode.is_decode() or self.absorbed:
                    q = self.queries[number, first : self.length].flatten(1)
                    out = self.mqa[number](q, rows, rows[..., :LATENT], forward_batch)
                    assert out.shape == (new, HEADS * LATENT)
                    continue
                # As `forward_normal` has it: rows are written past attention, which is over keys and values of heads.
                self.pool.set_kv_buffer(self.mha[number], KVWriteLoc(forward_batch.out_cache_loc, None), rows, None)
                q, k, v = torch.randn(3, new, HEADS * (NOPE + ROPE), generator=self.draws).unbind(0)
                out = self.mha[number](q, k, v, forward_batch, save_kv_cache=False)
                assert out.shape == q.shape
            return SimpleNamespace(logits_output=SimpleNamespace())

        with forward_context(ForwardContext(attn_backend=self.backend)):
            result = self.runtime.around_forward(model, self.runner, batch)
        step: StepCells = result.logits_output.witcert_step.step
        for layer, cells in step.layers.items():
            for number, row in enumerate(step.rows):
                tv, error = self.truth(layer, row.position)
                assert bool((tv <= cells.meter[number]).all())
                assert bool((error <= cells.out_bound[number]).all())
            assert cells.excess is not None
            assert not bool((cells.excess > 0).any())
        return step

    def truth(self, layer: int, position: int) -> tuple[Tensor, Tensor]:
        """True TV and latent output error [HEADS] of a row, over what is stored; of a decode row."""
        q = self.queries[layer, position].double()
        exact = self.exact[layer, : position + 1].double()
        stored = self.pool.get_key_buffer(layer)[self.slots[: position + 1], 0].double()
        p, served = ((q @ rows.T * SCALE).softmax(-1) for rows in (exact, stored))
        out = p @ exact[:, :LATENT] - served @ stored[:, :LATENT]
        return 0.5 * (p - served).abs().sum(-1), out.norm(dim=-1)


@pytest.mark.parametrize("absorbed", [True, False])
@pytest.mark.parametrize("quantizer", ["int4_token_group", "fp8_e4m3_cast", "int8_dither"])
def test_decode_rows_hold_however_the_prompt_attended(quantizer: str, absorbed: bool) -> None:
    engine = LatentEngine(quantizer, absorbed)
    first = engine.step(20)
    assert (first.rows, sum(first.unmetered.values())) == ([], 0)
    stored = engine.pool.get_key_buffer(0)[engine.slots[:20], 0]
    assert not torch.equal(stored, engine.exact[0, :20])
    for _ in range(5):
        step = engine.step(1)
        assert set(step.layers) == {0, 1}
        assert bool((step.layers[0].num_quantized > 0).all())


def test_a_multiplied_out_prefix_is_no_pass_that_is_followed() -> None:
    engine = LatentEngine("int8_token_group", absorbed=False)
    engine.step(20)
    with pytest.raises(UnsupportedError, match="layer 0 reads a prefix whose latents were multiplied out"):
        engine.step(4)


def test_slots_that_the_engine_moves_keep_their_witness() -> None:
    engine = LatentEngine("int8_token_group", absorbed=True)
    engine.step(20)
    target = engine.slots[30:32]
    engine.pool.move_kv_cache(target, engine.slots[2:4])
    engine.runtime.moved(target, engine.slots[2:4])
    side = engine.runtime.groups[0].cache.storage.store[0]  # type: ignore[attr-defined]
    assert torch.equal(side.value_radius(target), side.value_radius(engine.slots[2:4]))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_of_a_tiny_checkpoint(ranks: int, tmp_path: Path) -> None:
    """First chunk, decode steps, and a chunk over a cached prefix, on one rank and on two with half the heads each."""
    if ranks > (os.cpu_count() or 1):
        pytest.skip("each rank is bound to a core of its own")
    model, jsonl = make_checkpoint("deepseek_v3", tmp_path / "model"), tmp_path / "records.jsonl"
    policy = write_policy(
        tmp_path / "policy.yaml",
        quantizer={"name": "int8_token_group"},
        meter={"stride": 1, "audit_every": 1},
        report={"jsonl": str(jsonl), "cells": "all"},
    )
    path = os.pathsep.join([str(ABSORBED), os.environ.get("PYTHONPATH", "")])
    bind = "|".join(str(core) for core in range(ranks))
    environment = {"PYTHONPATH": path, "SGLANG_CPU_OMP_THREADS_BIND": bind}
    options = ["--dtype", "float32", "--tp-size", str(ranks)]
    prompt = [1] + [3 + i * 7 % 300 for i in range(60)]
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    log = tmp_path / "log"
    with (
        running_server(model, policy=policy, log=log, options=options, environment=environment) as server,
        server.client() as client,
    ):
        bodies = ({"input_ids": ids, "sampling_params": sampling} for ids in (prompt, [*prompt, 5, 6, 7]))
        answers = [client.post("/generate", json=body).raise_for_status().json() for body in bodies]
    assert "latent cache" in log.read_text()
    for answer in answers:
        found = answer["meta_info"]["witcert"]
        assert found["audit"]["violations"] == found["audit"]["mismatches"] == 0 < found["audit"]["outputs"]
        assert found["cells_measured"] == found["rows_metered"] * 2 * 4 > 0
    rows = [answer["meta_info"]["witcert"]["rows_metered"] for answer in answers]
    assert answers[1]["meta_info"]["cached_tokens"] > 0
    assert rows[1] > rows[0]  # those of its chunk, over a cached prefix
