"""The probabilistic tier's premise: the queries of a fixed text do not depend on the dither of their own layer.

A small model serves a fixed text several times; only the dither of one layer differs. Queries of that layer and of the
layers below it must be the same numbers, whatever gates repair and however little they may.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import witcert_core.cache.packed
import witcert_core.quantizers.int8_dither
from witcert_core.cache.packed import PackedLayer
from witcert_core.meter.attention import AttentionSpec
from witcert_core.policy.model import parse_policy
from witcert_core.quantizers.dither import DitherKey, dither_vectors
from witcert_core.quantizers.rotary import RotarySpec
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.passes import RequestPass
from witcert_core.serving.runtime import Runtime

D, SLOTS, LAYERS, SCALE = 32, 80, 2, 0.15
TOKEN_BYTES = 2 * D * 4
"""K and V of a slot in one layer."""
SALTED = 1
"""The layer whose dither differs."""
PASSES = [{"a": 12}, {"a": 1}, {"a": 1, "b": 6}, *[{"a": 1, "b": 1}] * 8]
"""New tokens of two requests; b shares the first eight tokens of a."""
SHARED = 8


class Pool:
    def __init__(self) -> None:
        self.k, self.v = torch.zeros(LAYERS, SLOTS, 1, D), torch.zeros(LAYERS, SLOTS, 1, D)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.k[layer, slots], self.v[layer, slots]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.k[layer, slots], self.v[layer, slots] = k, v

    def restore(self, layer: int, slots: Tensor, head: int, k: Tensor, v: Tensor) -> None:
        self.k[layer, slots, head], self.v[layer, slots, head] = k, v


def attend(
    pool: Pool, layer: int, slots: Tensor, seen: list[Tensor], q: Tensor, k: Tensor | None, v: Tensor | None
) -> Tensor:
    """An engine's attention: writes keys and values, then each query of q [N, D] reads the tokens it sees."""
    assert k is not None
    assert v is not None
    pool.write(layer, slots, k, v)
    outs = []
    for mine, tokens in zip(q, seen, strict=True):
        keys, values = (x[:, 0] for x in pool.read(layer, tokens))
        outs.append((mine @ keys.T * SCALE).softmax(-1) @ values)
    return torch.stack(outs)


def packed_layer() -> PackedLayer:
    def side(width: int, value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((SLOTS, 1, width), value, dtype=dtype)

    scales = [side(1, float("inf"), torch.float16) for _ in "kv"]
    return PackedLayer(side(D, 0, torch.int8), side(D, 0, torch.int8), *scales)


def play(salt: int, gate: dict[str, Any], storage: str) -> tuple[list[Tensor], list[int]]:
    """Queries of every layer and pass, in that order, and the blocks repaired in each layer."""
    torch.manual_seed(5)
    policy = parse_policy(
        {
            "version": 1,
            "quantizer": {"name": "int8_dither", "storage": storage},
            "meter": {"tier": "probabilistic", "audit_every": 0},
            "gate": {"kind": "certified", "tau": 0.005, "tau_out": 9.0, "target": "tv", "block_size": 1, **gate},
            "prefill_reads": "stored",
        }
    )
    every = tuple(range(LAYERS))
    geometry = Geometry("test", 1, every, 1, 1, (0,), D, D, SLOTS, torch.float32, RotarySpec(D), "cpu")
    pool, layers = Pool(), {layer: packed_layer() for layer in every}

    runtime = Runtime("test", policy, geometry, layers if storage == "packed" else pool, None)
    weights = torch.randn(LAYERS, 3, D, D) / D**0.5
    texts = {rid: torch.randn(40, D) * 4 for rid in "ab"}
    texts["b"][:SHARED] = texts["a"][:SHARED]
    slots = {"a": torch.arange(1, 41), "b": torch.cat([torch.arange(1, SHARED + 1), torch.arange(41, 73)])}
    lengths = {"a": 0, "b": SHARED}
    queries: list[Tensor] = []
    blocks = [0] * LAYERS
    for new in PASSES:
        requests, spans = [], []
        for rid, count in new.items():
            spans.append((rid, range(lengths[rid], lengths[rid] + count)))
            lengths[rid] += count
            requests.append(RequestPass(rid, slots[rid][: lengths[rid]], count, attends_quantized=True))
        hidden = torch.cat([texts[rid][span.start : span.stop] for rid, span in spans])
        out_slots = torch.cat([slots[rid][span.start : span.stop] for rid, span in spans])
        seen = [slots[rid][: place + 1] for rid, span in spans for place in span]
        runtime.begin(requests, out_slots)
        for layer in every:
            q, k, v = (hidden @ weights[layer, i] for i in range(3))
            queries.append(q.clone())

            run = functools.partial(attend, pool, layer, out_slots, seen, q)
            places = torch.cat([torch.arange(span.start, span.stop) for _, span in spans])
            call = AttentionCall(
                layer, q[:, None], k[:, None], v[:, None], out_slots, places, AttentionSpec(SCALE), run
            )
            out = runtime.attend(call).view(-1, D)
            hidden = torch.nn.functional.rms_norm(hidden + out * 3, (D,)) * 4
        step = runtime.end()
        assert step is not None
        for number, verdict in enumerate(step.verdicts):
            blocks[number // len(requests)] += verdict.repaired_blocks
    return queries, blocks


@pytest.mark.parametrize(
    ("gate", "storage"),
    [
        ({}, "simulated"),
        ({"max_pagein_bytes": 26 * TOKEN_BYTES}, "simulated"),
        ({"max_pagein_bytes": 26 * TOKEN_BYTES}, "packed"),
        ({"copy_bytes": 20 * LAYERS * TOKEN_BYTES}, "simulated"),
        ({"copy_bytes": 20 * LAYERS * TOKEN_BYTES}, "packed"),
    ],
    ids=["no limit", "page-in", "page-in packed", "copies", "copies packed"],
)
def test_queries_of_a_fixed_text_do_not_depend_on_the_dither_of_their_layer(
    monkeypatch: pytest.MonkeyPatch, gate: dict[str, Any], storage: str
) -> None:
    salt = 0

    def salted(key: DitherKey, pass_ids: Tensor, layer: int, heads: Any, dim: int) -> Tensor:
        return dither_vectors(DitherKey(0, 1000 + (salt if layer == SALTED else 0), 0), pass_ids, layer, heads, dim)

    for module in (witcert_core.cache.packed, witcert_core.quantizers.int8_dither):
        monkeypatch.setattr(module, "dither_vectors", salted)
    # What kernels draw is not salted.
    monkeypatch.setattr("witcert_core.serving.build.without_kernels", lambda *_: "this test")
    played = []
    for salt in (0, 3):
        played.append(play(salt, gate, storage))
    first, _ = played[0]
    for queries, _ in played[1:]:
        assert all(torch.equal(q, other) for q, other in zip(first, queries, strict=True))
    repaired = torch.tensor([blocks for _, blocks in played])
    assert (repaired[:, 0] == repaired[0, 0]).all()
    assert repaired[0, 0] > 0
    if not gate:
        assert (repaired[:, SALTED] != repaired[0, SALTED]).any()  # what the salted layer repairs does depend on it
    if "max_pagein_bytes" in gate:
        share = gate["max_pagein_bytes"] // LAYERS
        assert repaired.max() * TOKEN_BYTES <= len("ab") * share
