"""The metered backend on SGLang's own pool, attention layer and batch objects, without a server or a model.

Here every tensor is at hand, so the exact attention can be compared with what was computed and reported.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import Tensor
from witcert_sglang.backend import metered
from witcert_sglang.geometry import Geometry
from witcert_sglang.packed import PackedMethod
from witcert_sglang.results import StepCells
from witcert_sglang.runtime import Runtime

from witcert_core.errors import UnsupportedError
from witcert_core.gates import CellStatus
from witcert_core.policy import parse_policy
from witcert_core.rotary import RotarySpec

pytestmark = pytest.mark.sglang
HQ, HKV, D, LAYERS, SLOTS = 4, 2, 64, 2, 200
SCALE = D**-0.5


class Engine:
    """A pool, a metered backend and two attention layers, driven pass by pass."""

    def __init__(
        self,
        quantizer: str,
        dtype: torch.dtype = torch.float32,
        model_dtype: torch.dtype | None = None,
        **sections: Any,
    ) -> None:
        torch.manual_seed(0)
        meter = {"stride": 1, "audit_every": 1, "max_rows": 64, **sections.pop("meter", {})}
        storage = sections.pop("storage", "simulated")
        chosen = {"name": quantizer, "layers": sections.pop("quantized_layers", None), "storage": storage}
        policy = parse_policy({"version": 1, "quantizer": chosen, "meter": meter, **sections})
        self.requests = ReqToTokenPool(size=4, max_context_len=128, device="cpu", enable_memory_saver=False)
        method = PackedMethod(quantizer == "int8_dither_w") if storage == "packed" else None
        pool_dtype = torch.int8 if storage == "packed" else dtype
        self.pool = MHATokenToKVPool(SLOTS, 1, pool_dtype, HKV, D, LAYERS, "cpu", False, quant_method=method)
        self.runner = SimpleNamespace(device="cpu", req_to_token_pool=self.requests, token_to_kv_pool=self.pool)
        geometry = Geometry(
            backend="test",
            total_qo_heads=HQ,
            layers=tuple(range(LAYERS)),
            num_qo_heads=HQ,
            num_kv_heads=HKV,
            kv_head_ids=tuple(range(HKV)),
            head_dim=D,
            v_head_dim=D,
            num_slots=SLOTS + 1,
            pool_dtype=dtype,
            rotary=RotarySpec(D),
            device="cpu",
        )
        self.runtime = Runtime(policy, policy.build_quantizer(), geometry, self.pool, None)
        self.backend = metered(TorchNativeAttnBackend)(self.runner)
        self.backend.witcert_runtime = self.runtime
        self.layers = [RadixAttention(HQ, D, SCALE, num_kv_heads=HKV, layer_id=i) for i in range(LAYERS)]
        self.dtype = dtype
        self.model_dtype = model_dtype or dtype
        self.rows = self.requests.alloc_rows(2)
        free = torch.randperm(SLOTS)[: 2 * 60] + 1
        for i, row in enumerate(self.rows):
            self.requests.req_to_token[row, :60] = free[60 * i : 60 * (i + 1)].int()
        self.lens = [0, 0]
        self.exact: list[dict[str, Tensor]] = [  # every key and value ever written, by layer, request and position
            {kind: torch.zeros(2, 60, HKV, D) for kind in "kv"} for _ in range(LAYERS)
        ]

    def step(self, new: list[int], mode: ForwardMode) -> tuple[StepCells, list[Tensor], list[Tensor]]:
        """One pass in which request i gets new[i] tokens; returns its cells, queries and outputs by layer."""
        total = sum(new)
        prefix, self.lens = self.lens, [a + b for a, b in zip(self.lens, new, strict=True)]
        slots = torch.cat(
            [self.requests.req_to_token[r, p : p + n] for r, p, n in zip(self.rows, prefix, new, strict=True)]
        )
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=2,
            input_ids=torch.zeros(total, dtype=torch.int64),
            req_pool_indices=torch.tensor(self.rows),
            seq_lens=torch.tensor(self.lens),
            out_cache_loc=slots.long(),
            seq_lens_sum=sum(self.lens),
            rids=["a", "b"],
        )
        batch.positions = torch.cat([torch.arange(p, p + n) for p, n in zip(prefix, new, strict=True)])
        if not mode.is_decode():
            batch.extend_seq_lens = torch.tensor(new)
            batch.extend_prefix_lens = torch.tensor(prefix)
        queries, outputs = [], []

        def model(_runner: Any, forward_batch: ForwardBatch) -> Any:
            self.backend.init_forward_metadata(forward_batch)
            for number, layer in enumerate(self.layers):
                q, k, v = (torch.randn(total, h * D) * 2 for h in (HQ, HKV, HKV))
                self.remember(number, k, v, prefix, new)
                queries.append(q.view(total, HQ, D))
                out = layer(*(x.to(self.model_dtype) for x in (q, k, v)), forward_batch)
                outputs.append(out.float().view(total, HQ, D))
            return SimpleNamespace(logits_output=SimpleNamespace())

        with forward_context(ForwardContext(attn_backend=self.backend)):
            result = self.runtime.around_forward(model, self.runner, batch)
        return result.logits_output.witcert_step, queries, outputs

    def remember(self, layer: int, k: Tensor, v: Tensor, prefix: list[int], new: list[int]) -> None:
        done = 0
        for i, (p, n) in enumerate(zip(prefix, new, strict=True)):
            for kind, x in (("k", k), ("v", v)):
                self.exact[layer][kind][i, p : p + n] = x.to(self.dtype).float().view(-1, HKV, D)[done : done + n]
            done += n

    def stored(self, layer: int, request: int, count: int) -> tuple[Tensor, Tensor]:
        """What the pool holds for the first `count` tokens of a request."""
        slots = self.requests.req_to_token[self.rows[request], :count].long()
        if self.pool.dtype == torch.int8:
            return self.runtime.cache.cache.read(layer, slots)
        return self.pool.get_key_buffer(layer)[slots].float(), self.pool.get_value_buffer(layer)[slots].float()


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output [HQ, D] and weights [HQ, S] of one query [HQ, D] over k, v [S, HKV, D], in float64."""
    k, v = (x.double().repeat_interleave(HQ // HKV, 1) for x in (k, v))
    weights = (torch.einsum("hd,shd->hs", q.double(), k) * SCALE).softmax(-1)
    return torch.einsum("hs,shd->hd", weights, v), weights


BLACK_BOX = ("none", "fp8_e4m3_cast", "int8_token_group", "int4_token_group", "int2_token_group")


@pytest.mark.parametrize("name", [*BLACK_BOX, "int8_dither", "int8_dither_w"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_decode_is_bounded(name: str, dtype: torch.dtype) -> None:
    engine = Engine(name, dtype)
    engine.step([7, 31], ForwardMode.EXTEND)
    step, queries, outputs = engine.step([1, 1], ForwardMode.DECODE)
    assert [row.position for row in step.rows] == [7, 31]
    for layer in range(LAYERS):
        cells = step.layers[layer]
        for i, count in enumerate(engine.lens):
            q = queries[layer][i].to(dtype).float()
            k, v = engine.stored(layer, i, count)
            exact_k, exact_v = (engine.exact[layer][kind][i, :count] for kind in "kv")
            out, compressed = attention(q, k, v)
            exact_out, exact = attention(q, exact_k, exact_v)
            assert torch.allclose(outputs[layer][i].double(), out, atol=2e-2 if dtype == torch.bfloat16 else 1e-4)
            tv = (exact - compressed).abs().sum(-1) / 2
            assert (tv <= cells.meter[i]).all()
            assert ((exact_out - out).norm(dim=-1) <= cells.out_bound[i]).all()
            assert (cells.tv_audit[i] <= cells.meter[i]).all()
            if name == "none":
                assert (cells.meter[i] < (0.01 if dtype == torch.bfloat16 else 1e-3)).all()
            else:
                assert not torch.equal(k, exact_k)
                assert not torch.equal(v, exact_v)


@pytest.mark.parametrize("name", ["int4_token_group", "int8_dither", "int8_dither_w"])
def test_rounding_to_the_pools_dtype_is_no_part_of_the_error(name: str) -> None:
    """A pool narrower than the model: dithering the wider key would leave that rounding in no radius."""
    engine = Engine(name, torch.bfloat16, model_dtype=torch.float32)
    engine.step([7, 31], ForwardMode.EXTEND)
    for i, count in enumerate(engine.lens):
        slots = engine.requests.req_to_token[engine.rows[i], :count].long()
        k, _ = engine.stored(0, i, count)
        error = (k.double() - engine.exact[0]["k"][i, :count].double()).abs()
        for channel in range(D):
            q = torch.zeros(HQ, D, dtype=torch.float64)
            q[:, channel] = 1.0
            radius = engine.runtime.cache.store[0].key_radius(q, slots, 1.0, 0.0)
            assert (error[:, :, channel].T.repeat_interleave(HQ // HKV, 0) <= radius).all()


def test_chunk_exact_reads_its_own_keys_exactly_and_leaves_quantized_ones() -> None:
    engine = Engine("int4_token_group")
    _, queries, outputs = engine.step([5, 9], ForwardMode.EXTEND)
    step, queries, outputs = engine.step([4, 3], ForwardMode.EXTEND)
    token = 0
    for i, (old, new) in enumerate(((5, 4), (9, 3))):
        for offset in range(new):
            k, v = engine.stored(1, i, old)
            exact_k, exact_v = (engine.exact[1][kind][i, old : old + offset + 1] for kind in "kv")
            out, _ = attention(queries[1][token], torch.cat([k, exact_k]), torch.cat([v, exact_v]))
            assert torch.allclose(outputs[1][token].double(), out, atol=1e-4)
            token += 1
        k, _ = engine.stored(1, i, old + new)
        assert (k[old:] != engine.exact[1]["k"][i, old : old + new]).any(-1).all()
    assert [(row.request, row.position) for row in step.rows] == [(0, p) for p in range(5, 9)] + [
        (1, p) for p in range(9, 12)
    ]
    assert all((cells.tv_audit <= cells.meter).all() for cells in step.layers.values())


def test_first_chunk_reads_no_quantized_key() -> None:
    step, _, _ = Engine("int4_token_group").step([5, 9], ForwardMode.EXTEND)
    assert step.rows == []
    assert not step.unmetered


def test_stored_prefill_reads_quantized_keys_of_its_own_chunk() -> None:
    engine = Engine("int4_token_group", prefill_reads="stored")
    step, queries, outputs = engine.step([5, 9], ForwardMode.EXTEND)
    token = 0
    for i, new in enumerate((5, 9)):
        for offset in range(new):
            k, v = engine.stored(0, i, offset + 1)
            out, _ = attention(queries[0][token], k, v)
            assert torch.allclose(outputs[0][token].double(), out, atol=1e-4)
            token += 1
    assert len(step.rows) == 14
    assert (step.layers[0].meter[1:] > 0.01).any()


def test_decode_rows_inside_a_mixed_chunk_are_metered() -> None:
    engine = Engine("int4_token_group")
    engine.step([6, 9], ForwardMode.EXTEND)
    step, queries, _ = engine.step([1, 12], ForwardMode.MIXED)
    assert step.rows[0].request == 0
    assert step.rows[0].position == 6
    k, _ = engine.stored(0, 0, 6)
    exact = engine.exact[0]["k"][0, :7]
    read = torch.cat([k, exact[6:]])
    _, compressed = attention(queries[0][0], read, read)
    _, true = attention(queries[0][0], exact, exact)
    tv = (true - compressed).abs().sum(-1) / 2
    assert (tv <= step.layers[0].meter[0]).all()
    assert (tv > 0).all()


def test_a_reused_slot_forgets_its_former_token() -> None:
    engine = Engine("fp8_e4m3_cast")
    engine.step([5, 9], ForwardMode.EXTEND)
    before = engine.runtime.cache.store[0].witness.clone()
    engine.lens = [0, 0]
    engine.step([5, 9], ForwardMode.EXTEND)
    slots = engine.requests.req_to_token[engine.rows[0], :5].long()
    assert not torch.equal(engine.runtime.cache.store[0].witness[slots], before[slots])
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    assert (step.layers[0].tv_audit <= step.layers[0].meter).all()


def test_a_slot_written_behind_the_meter_is_unknown() -> None:
    engine = Engine("int8_token_group")
    engine.step([5, 9], ForwardMode.EXTEND)
    stranger = engine.requests.req_to_token[engine.rows[0], 2:3].long()
    engine.runtime.cache.store.mark_unknown(0, stranger)
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    assert (step.layers[0].meter[0] == 1).all()
    assert (step.layers[0].meter[1] < 1).all()
    assert (step.layers[1].meter[0] < 1).all()


def test_unquantized_layers_are_exact_and_metered_ones_chosen() -> None:
    engine = Engine("int4_token_group", quantized_layers=[1], meter={"layers": [0]})
    engine.step([5, 9], ForwardMode.EXTEND)
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    assert set(step.layers) == {0}
    assert (step.layers[0].meter < 1e-3).all()


@pytest.mark.parametrize("name", ["int8_dither", "int8_dither_w"])
def test_dithered_layer_left_exact(name: str) -> None:
    engine = Engine(name, quantized_layers=[1])
    engine.step([5, 9], ForwardMode.EXTEND)
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    assert (step.layers[0].meter < 1e-3).all()
    assert (step.layers[1].meter > 1e-3).any()


def test_a_fused_write_is_refused() -> None:
    engine = Engine("int8_token_group")
    attend = engine.backend.forward

    def without_saving(q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, *_args: Any, **_kw: Any) -> Tensor:
        return attend(q, k, v, layer, batch, save_kv_cache=False)

    engine.backend.forward = without_saving
    with pytest.raises(UnsupportedError, match="fused write"):
        engine.step([5, 9], ForwardMode.EXTEND)


def test_attention_past_the_meter_is_refused() -> None:
    engine = Engine("int8_token_group")
    engine.layers = engine.layers[:1]
    with pytest.raises(UnsupportedError, match="bypasses the meter"):
        engine.step([5, 9], ForwardMode.EXTEND)


def test_stride_counts_rows_of_each_request() -> None:
    engine = Engine("int8_token_group", meter={"stride": 3})
    engine.step([5, 9], ForwardMode.EXTEND)
    metered_rows = []
    for _ in range(7):
        step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
        metered_rows.append(len(step.rows))
        assert len(step.rows) + sum(step.unmetered.values()) == 2
    assert metered_rows == [2, 0, 0, 2, 0, 0, 2]


def gated(name: str, kind: str = "certified", **gate: Any) -> Engine:
    return Engine(name, gate={"kind": kind, "block_size": 4, **gate})


@pytest.mark.parametrize("name", ["fp8_e4m3_cast", "int4_token_group", "int2_token_group", "int8_dither"])
def test_a_certified_step_serves_what_it_certified(name: str) -> None:
    """Every cell ends within both targets, and the output that goes on is attention over the repaired cache."""
    engine = gated(name)
    engine.step([17, 31], ForwardMode.EXTEND)
    for _ in range(3):
        step, queries, outputs = engine.step([1, 1], ForwardMode.DECODE)
        for layer in range(LAYERS):
            cells = step.layers[layer]
            assert (cells.meter <= 0.2).all()
            assert (cells.out_bound <= 0.1 * cells.out_norm * (1 + 1e-9)).all()
            assert (cells.tv_audit <= cells.meter).all()
            for i, count in enumerate(engine.lens):
                out, compressed = attention(queries[layer][i], *engine.stored(layer, i, count))
                exact_out, exact = attention(queries[layer][i], *(engine.exact[layer][x][i, :count] for x in "kv"))
                assert torch.allclose(outputs[layer][i].double(), out, atol=1e-4)
                assert ((exact - compressed).abs().sum(-1) / 2 <= cells.meter[i]).all()
                assert ((exact_out - out).norm(dim=-1) <= cells.out_bound[i]).all()
    repaired = sum(outcome.repaired_blocks for outcome in step.verdicts)
    assert all((outcome.status == CellStatus.CERTIFIED).all() for outcome in step.verdicts)
    assert repaired <= 2 * LAYERS * HKV * 14


def test_a_block_is_paged_in_at_most_once() -> None:
    engine = gated("int2_token_group")
    engine.step([16, 32], ForwardMode.EXTEND)
    moved = Counter()
    for _ in range(4):
        step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
        for outcome in step.verdicts:
            moved[outcome.index] += outcome.repaired_bytes
    per_token = 2 * D * 4
    for index, count in enumerate(engine.lens):
        assert 0 < moved[index] <= LAYERS * HKV * count * per_token


def test_rows_over_a_quantized_prefix_are_gated_too() -> None:
    engine = gated("int2_token_group")
    engine.step([9, 14], ForwardMode.EXTEND)
    step, queries, outputs = engine.step([6, 5], ForwardMode.EXTEND)
    assert len(step.rows) == 11
    assert all((cells.meter <= 0.2).all() for cells in step.layers.values())
    assert sum(outcome.repaired_blocks for outcome in step.verdicts) > 0
    token = 0
    for i, (old, new) in enumerate(((9, 6), (14, 5))):
        k, v = engine.stored(1, i, old)
        for offset in range(new):
            own_k, own_v = (engine.exact[1][kind][i, old : old + offset + 1] for kind in "kv")
            out, _ = attention(queries[1][token], torch.cat([k, own_k]), torch.cat([v, own_v]))
            assert torch.allclose(outputs[1][token].double(), out, atol=1e-4)
            token += 1


def test_without_copies_a_step_is_not_certified_and_says_so() -> None:
    engine = gated("int2_token_group", shadow_bytes=LAYERS * HKV * 2 * D * 4 * 3)  # room for three slots
    engine.step([17, 31], ForwardMode.EXTEND)
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    reasons = {outcome.gave_up for outcome in step.verdicts}
    assert any("gone from the shadow" in reason for reason in reasons)
    worst = max(cells.meter.max() for cells in step.layers.values())
    assert worst > 0.2
    assert any((outcome.status == CellStatus.NOT_CERTIFIED).any() for outcome in step.verdicts)


def test_the_page_in_budget_is_kept() -> None:
    budget = 6 * 4 * 2 * D * 4
    engine = gated("int2_token_group", max_pagein_bytes=budget)
    engine.step([17, 31], ForwardMode.EXTEND)
    moved = Counter()
    for _ in range(3):
        step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
        for outcome in step.verdicts:
            moved[outcome.index] += outcome.repaired_bytes
    assert max(moved.values()) <= budget
    assert any("budget" in outcome.gave_up for outcome in step.verdicts)


def test_the_ranking_gate_touches_saturated_cells_only() -> None:
    engine = gated("int8_token_group", kind="risk_ranked")
    engine.step([17, 31], ForwardMode.EXTEND)
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    assert all(outcome.repaired_blocks == 0 for outcome in step.verdicts)
    engine = gated("int2_token_group", kind="risk_ranked")
    engine.step([17, 31], ForwardMode.EXTEND)
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    assert any(outcome.repaired_blocks for outcome in step.verdicts)


def test_gated_measurements_equal_ungated_ones_where_nothing_was_repaired() -> None:
    steps = []
    for build in (Engine, gated):
        sections = {} if build is Engine else {"tau": 1.0, "target": "tv"}
        engine = build("int8_token_group", **sections)  # seeds the generator
        engine.step([17, 31], ForwardMode.EXTEND)
        steps.append(engine.step([1, 1], ForwardMode.DECODE)[0])
    ours, theirs = steps
    for layer in range(LAYERS):
        for name in ("meter", "log_a", "out_bound", "out_norm", "tv_audit"):
            a, b = getattr(ours.layers[layer], name), getattr(theirs.layers[layer], name)
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("name", ["int8_dither", "int8_dither_w"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("reads", ["chunk_exact", "stored"])
def test_the_packed_pool_is_read_and_bounded(name: str, dtype: torch.dtype, reads: str) -> None:
    engine = Engine(name, dtype, storage="packed", prefill_reads=reads)
    engine.step([7, 31], ForwardMode.EXTEND)
    engine.step([5, 2], ForwardMode.EXTEND)
    step, queries, outputs = engine.step([1, 1], ForwardMode.DECODE)
    assert engine.pool.k_buffer[0].dtype == torch.int8
    width = 2 * (D + 2 * 2) + (2 if name == "int8_dither_w" else 0)
    assert engine.runtime.cache.cache.nbytes == LAYERS * HKV * (SLOTS + 1) * width
    for layer in range(LAYERS):
        cells = step.layers[layer]
        for i, count in enumerate(engine.lens):
            q = queries[layer][i].to(dtype).float()
            out, compressed = attention(q, *engine.stored(layer, i, count))
            exact_out, exact = attention(q, *(engine.exact[layer][kind][i, :count] for kind in "kv"))
            assert torch.allclose(outputs[layer][i].double(), out, atol=2e-2 if dtype == torch.bfloat16 else 1e-4)
            assert ((exact - compressed).abs().sum(-1) / 2 <= cells.meter[i]).all()
            assert ((exact_out - out).norm(dim=-1) <= cells.out_bound[i]).all()
            assert (cells.tv_audit[i] <= cells.meter[i]).all()
            assert (cells.meter[i] < 0.5).all()
        assert (step.witness_layers[layer].meter >= cells.meter).all()


def test_a_packed_chunk_reads_itself_exactly() -> None:
    engine = Engine("int8_dither", storage="packed")
    engine.step([5, 9], ForwardMode.EXTEND)
    _, queries, outputs = engine.step([4, 3], ForwardMode.EXTEND)
    token = 0
    for i, (old, new) in enumerate(((5, 4), (9, 3))):
        k, v = engine.stored(1, i, old)
        for offset in range(new):
            own_k, own_v = (engine.exact[1][kind][i, old : old + offset + 1] for kind in "kv")
            out, _ = attention(queries[1][token], torch.cat([k, own_k]), torch.cat([v, own_v]))
            assert torch.allclose(outputs[1][token].double(), out, atol=1e-4)
            token += 1


def test_a_write_past_the_packed_backend_is_an_error() -> None:
    engine = Engine("int8_dither", storage="packed")
    with pytest.raises(NotImplementedError, match="unmetered"):
        engine.pool.set_kv_buffer(engine.layers[0], torch.tensor([3]), torch.zeros(1, HKV, D), torch.zeros(1, HKV, D))


def test_rows_the_engine_moves_keep_what_is_known() -> None:
    """SGLang copies rows of its pool in some paths; a witness left behind would belong to another token."""
    engine = gated("int4_token_group", kind="risk_ranked", risk_tau=1e9)
    engine.step([9, 14], ForwardMode.EXTEND)
    old = engine.requests.req_to_token[engine.rows[1], 2:7].long()
    new = engine.requests.req_to_token[engine.rows[0], 40:45].long()
    engine.pool.use_native_move_kv_cache = True
    engine.pool.move_kv_cache(new, old)
    engine.runtime.cache.moved(new, old)
    engine.requests.req_to_token[engine.rows[1], 2:7] = new.int()
    step, queries, _ = engine.step([1, 1], ForwardMode.DECODE)
    for layer in range(LAYERS):
        _, compressed = attention(queries[layer][1], *engine.stored(layer, 1, 15))
        _, exact = attention(queries[layer][1], *(engine.exact[layer][kind][1, :15] for kind in "kv"))
        assert ((exact - compressed).abs().sum(-1) / 2 <= step.layers[layer].meter[1]).all()
        assert (step.layers[layer].meter[1] < 1).all()
    assert not engine.runtime.cache.shadow.has(new).any()


def test_rows_restored_from_elsewhere_are_unknown() -> None:
    engine = Engine("int8_token_group")
    engine.step([9, 14], ForwardMode.EXTEND)
    engine.runtime.cache.overwritten(engine.requests.req_to_token[engine.rows[0], :3].long())
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    assert (step.layers[0].meter[0] == 1).all()
    assert (step.layers[0].meter[1] < 1).all()
