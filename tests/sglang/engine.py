"""SGLang's own pool, attention layers and batch objects around the metered backend, without a server or a model.

Every key ever written is at hand, so exact attention can be compared with what was computed and reported.
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from torch import Tensor
from witcert_sglang.backend import metered
from witcert_sglang.packed import packed_method
from witcert_sglang.runtime import SglangRuntime
from witcert_sglang.selfcheck import plan_slots
from witcert_sglang.sub_pools import sub_pools

from witcert_core.policy.model import parse_policy
from witcert_core.quantizers.rotary import RotarySpec
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.steps import StepCells
from witcert_core.serving.storage.attended import Storage
from witcert_core.serving.storage.coded import CodedStorage
from witcert_core.serving.storage.engine import EngineStorage
from witcert_core.serving.storage.packed import PackedStorage
from witcert_core.serving.storage.simulated import SimulatedStorage

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
        own_pool = sections.pop("own_pool", None)  # a dtype or a KV-cache method of SGLang's own
        meter = {"stride": 1, "audit_every": 1, "max_rows": 64, **sections.pop("meter", {})}
        storage = sections.pop("storage", "simulated")
        make_pool = sections.pop("make_pool", None)  # of a pool of pools: takes a dtype
        window = sections.pop("window", -1)  # SGLang's sliding_window_size: tokens before a row's own
        self.window, self.cap = window, sections.pop("cap", 0.0)
        stock = sections.pop("stock", TorchNativeAttnBackend)  # of a runner, SGLang's own backend
        self.outliers = sections.pop("outliers", {})  # channel -> what its keys are multiplied with
        chosen = {
            "name": quantizer,
            "params": sections.pop("params", {}),
            "layers": sections.pop("quantized_layers", None),
            "storage": storage,
        }
        if apart := re.fullmatch("k=(.*),v=(.*)", quantizer):
            chosen = {"k": {"name": apart[1]}, "v": {"name": apart[2]}, "storage": storage}
        policy = parse_policy({"version": 1, "quantizer": chosen, "meter": meter, **sections})
        self.requests = ReqToTokenPool(size=4, max_context_len=128, device="cpu", enable_memory_saver=False)
        method: Any = packed_method(policy, D, D, dtype) if storage == "packed" else None
        pool_dtype = torch.int8 if storage == "packed" else dtype
        if isinstance(own_pool, torch.dtype):
            pool_dtype = own_pool
        elif own_pool is not None:
            method, pool_dtype = own_pool, torch.float4_e2m1fn_x2
        if make_pool is None:
            self.pool = MHATokenToKVPool(SLOTS, 1, pool_dtype, HKV, D, LAYERS, "cpu", False, quant_method=method)
        else:
            self.pool = make_pool(pool_dtype)
        subs = sub_pools(self.pool)
        ids = sorted(layer for sub in subs for layer in sub.layers)
        forgets = {layer for sub in subs if sub.windowed for layer in sub.layers}
        self.runner = SimpleNamespace(device="cpu", req_to_token_pool=self.requests, token_to_kv_pool=self.pool)
        geometry = Geometry(
            backend="test",
            total_qo_heads=HQ,
            layers=subs[0].layers,
            num_qo_heads=HQ,
            num_kv_heads=HKV,
            kv_head_ids=tuple(range(HKV)),
            head_dim=D,
            v_head_dim=D,
            num_slots=subs[0].pool.k_buffer[0].shape[0],
            pool_dtype=dtype,
            rotary=RotarySpec(D),
            device="cpu",
        )
        others = [
            replace(
                geometry,
                layers=sub.layers,
                num_slots=sub.pool.k_buffer[0].shape[0],
                window=window if sub.windowed else None,
                null_slots=int(sub.windowed),
            )
            for sub in subs[1:]
        ]
        self.runtime = SglangRuntime(policy, geometry, self.pool, None, others=others)
        self.runner.sliding_window_size = window if window >= 0 else None
        self.backend = stock(self.runner)
        self.backend.__class__ = metered(type(self.backend))  # type: ignore[arg-type]
        self.backend.witcert_runtime = self.runtime
        self.checks_outputs = True  # whether a pass fails where an audited output is not what is stored
        self.layers = [
            RadixAttention(
                HQ,
                D,
                SCALE,
                num_kv_heads=HKV,
                layer_id=i,
                logit_cap=self.cap,
                sliding_window_size=window if i in forgets or make_pool is None else -1,
            )
            for i in ids
        ]
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
        """One pass in which request i gets new[i] tokens; returns its cells, queries and outputs by layer.

        A pass that verifies has as many for all, the newest of each and drafts.
        """
        total, verifies = sum(new), mode.is_target_verify()
        prefix, self.lens = self.lens, [a + b for a, b in zip(self.lens, new, strict=True)]
        slots = torch.cat(
            [self.requests.req_to_token[r, p : p + n] for r, p, n in zip(self.rows, prefix, new, strict=True)]
        )
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=2,
            input_ids=torch.zeros(total, dtype=torch.int64),
            req_pool_indices=torch.tensor(self.rows),
            seq_lens=torch.tensor(prefix if verifies else self.lens),
            out_cache_loc=slots.long(),
            seq_lens_sum=sum(prefix if verifies else self.lens),
            rids=["a", "b"],
        )
        batch.positions = torch.cat([torch.arange(p, p + n) for p, n in zip(prefix, new, strict=True)])
        if verifies:
            batch.spec_info = chain(prefix, new[0])
        elif not mode.is_decode():
            batch.extend_seq_lens = torch.tensor(new)
            batch.extend_prefix_lens = torch.tensor(prefix)
        queries, outputs = [], []

        def model(_runner: Any, forward_batch: ForwardBatch) -> Any:
            plan_slots(self.backend, forward_batch)
            self.backend.init_forward_metadata(forward_batch)
            for number, layer in enumerate(self.layers):
                q, k, v = (torch.randn(total, h * D) * 2 for h in (HQ, HKV, HKV))
                for channel, factor in self.outliers.items():
                    k.view(total, HKV, D)[..., channel] *= factor
                self.remember(number, k, v, prefix, new)
                queries.append(q.view(total, HQ, D))
                out = layer(*(x.to(self.model_dtype) for x in (q, k, v)), forward_batch)
                outputs.append(out.float().view(total, HQ, D))
            return SimpleNamespace(logits_output=SimpleNamespace(auxiliary_device_output=None))

        with forward_context(ForwardContext(attn_backend=self.backend)):
            result = self.runtime.around_forward(model, self.runner, batch)
        step = result.logits_output.witcert_step.step
        assert self.mismatches(step) == 0 or not self.checks_outputs
        return step, queries, outputs

    @staticmethod
    def mismatches(step: StepCells) -> int:
        """Audited cells whose output is no attention over what is stored."""
        found = [cells.excess for cells in step.layers.values() if cells.excess is not None]
        return sum(int((excess > 0).sum()) for excess in found)

    def remember(self, layer: int, k: Tensor, v: Tensor, prefix: list[int], new: list[int]) -> None:
        done = 0
        for i, (p, n) in enumerate(zip(prefix, new, strict=True)):
            for kind, x in (("k", k), ("v", v)):
                self.exact[layer][kind][i, p : p + n] = x.to(self.dtype).float().view(-1, HKV, D)[done : done + n]
            done += n

    @property
    def storage(self) -> Storage:
        """Where tokens live."""
        return self.runtime.groups[0].cache.storage

    @property
    def simulated(self) -> SimulatedStorage | EngineStorage:
        """What is stored in the engine's own pool."""
        storage = self.storage
        assert isinstance(storage, SimulatedStorage | EngineStorage)
        return storage

    @property
    def packed(self) -> PackedStorage:
        """What is stored in a packed pool."""
        storage = self.storage
        assert isinstance(storage, PackedStorage)
        return storage

    def stored(self, layer: int, request: int, count: int) -> tuple[Tensor, Tensor]:
        """What the pool holds for the first `count` tokens of a request."""
        slots = self.requests.req_to_token[self.rows[request], :count].long()
        if isinstance(self.storage, CodedStorage):
            return (self.storage.repaired or self.storage).read(layer, slots)
        if self.pool.dtype == torch.int8:
            return (self.packed.repaired or self.packed.cache).read(layer, slots)
        if self.runtime.policy.meters_engine:
            k, v = self.simulated.pool.read(layer, slots)
            return k.float(), v.float()
        return self.pool.get_key_buffer(layer)[slots].float(), self.pool.get_value_buffer(layer)[slots].float()


def chain(prefix: list[int], count: int, topk: int = 1) -> EagleVerifyInput:
    """What SGLang's EAGLE workers hand to a pass that verifies `count` tokens of each request behind `prefix`."""
    behind = torch.ones(count, count).tril().bool()
    masks = [torch.cat([torch.ones(count, length, dtype=torch.bool), behind], 1).flatten() for length in prefix]
    unread = [
        "draft_token",
        "positions",
        "retrieve_index",
        "retrieve_next_token",
        "retrieve_next_sibling",
        "retrieve_cum_len",
    ]
    unread += ["capture_hidden_mode", "seq_lens_sum", "seq_lens_cpu"]
    chosen = {"spec_steps": count - 1, "topk": topk, "draft_token_num": count}
    return EagleVerifyInput(custom_mask=torch.cat(masks), **chosen, **dict.fromkeys(unread))


def triton_backend(runner: Any) -> Any:
    """SGLang's own Triton backend over the pool of an `Engine`; Triton must have been imported to interpret."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.test.kits.attention_unittest.attention_methods import dense_attention as kit

    window, pool = runner.sliding_window_size, runner.token_to_kv_pool
    case = kit.DenseAttentionCase("", "triton", ForwardMode.DECODE, HQ, HKV, 1, (1, 1), sliding_window_size=window)
    config = kit.TinyModelConfig(
        num_heads=HQ, num_kv_heads=HKV, head_dim=D, hidden_size=D, context_len=128, sliding_window_size=window
    )
    whole = kit.MockModelRunner(
        case=case, model_config=config, dtype=pool.dtype, device="cpu", max_context_len=128, head_dim=D
    )
    whole.req_to_token_pool, whole.token_to_kv_pool = runner.req_to_token_pool, pool
    whole.token_to_kv_pool_allocator.get_kvcache = lambda: pool
    whole.init_kv_index_translator()
    return TritonAttnBackend(whole)


def gated(
    name: str,
    kind: str = "certified",
    meter: dict[str, Any] | None = None,
    storage: str = "simulated",
    **gate: Any,
) -> Engine:
    return Engine(name, meter=meter or {}, storage=storage, gate={"kind": kind, "block_size": 4, **gate})
