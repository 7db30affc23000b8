"""How many blocks a gate restores, beside one that knows the true TV and beside one that takes them in random order.

Offline, with the runtime that also meters SGLang: prompts read their own exact keys, answers are decoded greedily.
All three gates stop at the same target, so what differs is what they restore on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from witcert_demo.score import exact_match
from witcert_demo.tasks import Sample

from witcert_core.evaluate.offline.engine import OfflineEngine
from witcert_core.evaluate.offline.model import LoadedModel, load_model
from witcert_core.evaluate.stats import mean_interval, paired_difference
from witcert_core.policy.gates import Certified, GateDecision, GateState, Observe
from witcert_core.policy.model import parse_policy
from witcert_core.policy.plugins import register
from witcert_core.serving.storage.acts import Gating
from witcert_core.serving.storage.gated_rows import LayerCall, RequestRows
from witcert_core.serving.storage.repair import BlockRepairer, Outcome
from witcert_core.serving.storage.simulated import SimulatedStorage

TAU, BLOCK = 0.2, 16
QUANTIZERS = ("fp8_e4m3_cast", "int4_token_group", "int2_token_group")


@register
@dataclass(frozen=True)
class RandomOrder(Certified):
    """`certified` that restores blocks in an order that has nothing to do with them."""

    name: ClassVar[str] = "bench_random_order"
    repairs: ClassVar[bool] = True

    def decide(self, state: GateState) -> GateDecision:
        decision = super().decide(state)
        if decision.action != "repair":
            return decision
        generator = torch.Generator().manual_seed(len(state.repaired))
        order = torch.randperm(len(state.repaired), generator=generator)
        candidates = order[(~state.repaired & state.available)[order]]
        return replace(decision, block=int(candidates[0]))


class Oracle(BlockRepairer):
    """Restores the block with the largest share in the true TV until the true TV is within target."""

    def run(self, call: LayerCall, requests: Sequence[RequestRows]) -> list[Outcome]:
        return [self.run_one(call, rows) for rows in requests]

    def run_one(self, call: LayerCall, rows: RequestRows) -> Outcome:
        changed: dict[int, Tensor] = {}
        restored = 0
        stored_k, stored_v = call.pool.read(call.layer, rows.slots)
        block_of = torch.arange(len(rows.slots)) // self.block_size
        for head in range(stored_k.shape[1]):
            group = rows.q.shape[1] // stored_k.shape[1]
            own = slice(head * group, (head + 1) * group)
            exact_k, exact_v = self.copies.get(call.layer, rows.slots, head)
            k, v = stored_k[:, head].clone(), stored_v[:, head].clone()
            left = ~self.store[call.layer].exact_heads(rows.slots)[:, head]
            while True:
                weights = [self.weights(call, rows, own, keys) for keys in (exact_k, k)]
                moved = (weights[0] - weights[1]).abs() / 2  # [R, G, S]
                if float(moved.sum(-1).max()) <= TAU or not bool(left.any()):
                    break
                share = torch.zeros(int(block_of[-1]) + 1, dtype=torch.float64)
                share.index_add_(0, block_of, (moved * left).sum((0, 1)))
                open_blocks = torch.zeros_like(share, dtype=torch.bool)
                open_blocks[block_of[left]] = True
                block = int(torch.where(open_blocks, share, -1.0).argmax())
                mine = (block_of == block) & left
                call.pool.restore(call.layer, rows.slots[mine], head, exact_k[mine], exact_v[mine])
                self.store[call.layer].head(head).mark_exact(rows.slots[mine])
                k[mine], v[mine] = exact_k[mine], exact_v[mine]
                left &= ~mine
                restored += int(mine.sum())
                changed[head] = (self.weights(call, rows, own, k) @ v.double()).to(rows.q.dtype)
        (outcome,) = super().run(call, [rows])
        outcome.outputs.update(changed)
        outcome.repaired_bytes = restored * (stored_k.shape[-1] + stored_v.shape[-1]) * stored_k.element_size()
        return outcome

    def weights(self, call: LayerCall, rows: RequestRows, own: slice, keys: Tensor) -> Tensor:
        """[R, G, S] float64 of one KV head."""
        out = []
        for q, position in zip(rows.q[:, own].double(), rows.positions.tolist(), strict=True):
            logits = call.spec.logits(q, keys[:, None].double())
            logits[:, position + 1 :] = -torch.inf
            out.append(logits.softmax(-1))
        return torch.stack(out)


def use_oracle(engine: OfflineEngine) -> None:
    acts = engine.runtime.groups[0].cache.acts
    assert isinstance(acts, Gating)
    before = acts.repairer
    acts.repairer = Oracle(Observe(), before.store, before.copies, block_size=before.block_size, max_pagein_bytes=None)


def forget_repairs(engine: OfflineEngine) -> None:
    """Put back, after every pass, what was stored before its repairs: the traffic of a gate without persistence."""
    storage, pool = engine.runtime.groups[0].cache.storage, engine.passes.pool
    assert isinstance(storage, SimulatedStorage)
    undo: list[Callable[[], None]] = []
    plain_restore, plain_forward = pool.restore, engine.forward

    def restore(layer: int, slots: Tensor, head: int, k: Tensor, v: Tensor) -> None:
        old_k, old_v = (x[:, head].clone() for x in pool.read(layer, slots))
        side = storage.store[layer].head(head)
        kept = [(tensor, tensor[slots].clone()) for tensor in side.tensors()]

        def put_back() -> None:
            plain_restore(layer, slots, head, old_k, old_v)
            for tensor, old in kept:
                tensor[slots] = old

        undo.append(put_back)
        plain_restore(layer, slots, head, k, v)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        logits = plain_forward(*args, **kwargs)
        while undo:
            undo.pop()()
        return logits

    pool.restore, engine.forward = restore, forward  # type: ignore[method-assign]


def engine_for(loaded: LoadedModel, quantizer: str, gate: dict[str, Any], max_tokens: int) -> OfflineEngine:
    policy = {"version": 1, "quantizer": {"name": quantizer}, "gate": {"block_size": BLOCK, **gate}}
    return OfflineEngine(loaded, parse_policy(policy), max_tokens)


def run(engine: OfflineEngine, samples: list[Sample]) -> dict[str, list[float]]:
    """Answers right, and bytes paged in as a share of all keys and values of the request.

    With persistent repairs that is the share of blocks made exact; without, a block counts each time.
    """
    right, share = [], []
    shape = engine.runtime.geometry
    width = (shape.head_dim + shape.v_head_dim) * shape.pool_dtype.itemsize
    for number, sample in enumerate(samples):
        answer = engine.generate(f"{number}", sample.prompt_ids, 16)
        right.append(float(exact_match(sample, answer.ids)))
        written = len(sample.prompt_ids) + len(answer.ids) - 1
        share.append(answer.summary["gate"]["bytes"] / (len(shape.layers) * shape.num_kv_heads * written * width))
    return {"right": right, "share": share}


def measure(twin: Path, samples: list[Sample]) -> list[dict[str, Any]]:
    """A row a quantizer and gate."""
    loaded = load_model(str(twin), "float32")
    room = max(len(sample.prompt_ids) for sample in samples) + 16
    exact = run(engine_for(loaded, "none", {"kind": "observe"}, room), samples)
    rows = []
    for quantizer in QUANTIZERS:
        raw = run(engine_for(loaded, quantizer, {"kind": "observe"}, room), samples)
        rows.append(row(quantizer, "no gate", raw, exact))
        for name, gate in (
            ("combined (default)", {"kind": "combined"}),
            ("certified, TV", {"kind": "certified", "target": "tv"}),
            ("random order, TV", {"kind": RandomOrder.name, "target": "tv"}),
        ):
            rows.append(row(quantizer, name, run(engine_for(loaded, quantizer, gate, room), samples), exact))
        engine = engine_for(loaded, quantizer, {"kind": "certified", "target": "tv"}, room)
        use_oracle(engine)
        rows.append(row(quantizer, "oracle, true TV", run(engine, samples), exact))
        engine = engine_for(loaded, quantizer, {"kind": "combined"}, room)
        forget_repairs(engine)
        rows.append(row(quantizer, "combined, not persistent", run(engine, samples), exact))
    return rows


def row(quantizer: str, gate: str, found: dict[str, list[float]], exact: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "quantizer": quantizer,
        "gate": gate,
        "right": mean_interval(found["right"]).as_dict(),
        "minus_exact": paired_difference(found["right"], exact["right"]).as_dict(),
        "share": mean_interval(found["share"]).as_dict(),
    }
