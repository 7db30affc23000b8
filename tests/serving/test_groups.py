"""Cache groups: layers whose tokens are in other slots are one runtime, and what has left a window is never read.

Four attention layers of six: two keep every token, two a window, whose slots are taken again by other requests as soon
as their tokens have left it. The truth is computed from what the requests themselves remember.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from witcert_core.errors import UnsupportedError
from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.tv import softmax_with_sink
from witcert_core.policy.model import parse_policy
from witcert_core.quantizers.rotary import RotarySpec
from witcert_core.quantizers.token_group import Int4TokenGroup
from witcert_core.report.claims import SAMPLED_PREFIX
from witcert_core.serving.banner import banner_text
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.groups import GroupSlots
from witcert_core.serving.passes import RequestPass
from witcert_core.serving.runtime import Runtime
from witcert_core.serving.steps import StepCells

HQ, HKV, D, HIDDEN_LAYERS = 4, 2, 32, 6
FULL, WINDOWED = (1, 4), (0, 3)
WINDOW_LEFT, SLOTS, WINDOW_SLOTS = 11, 300, 60
SINKS = torch.linspace(-1, 1, HQ)


def let_wait(patch: pytest.MonkeyPatch, group: int = 4, recent: int = 4, calibration: int = 0) -> None:
    """Make `int4_token_group` wait for so many tokens."""
    patch.setattr(Int4TokenGroup, "kinds_alike", False)
    patch.setattr(Int4TokenGroup, "token_group", group)
    patch.setattr(Int4TokenGroup, "recent_tokens", recent)
    patch.setattr(Int4TokenGroup, "calibration_tokens", calibration)
    patch.setattr(Int4TokenGroup, "bytes_per_token_head", lambda _self, head_dim: head_dim * 1.25)


class Request:
    """Its slots in both groups, and keys and values [LAYERS, 200, HKV, D] as a model would hand them over."""

    def __init__(self, seed: int, prefix_of: Request | None = None, shared: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.name = f"request-{seed}"
        self.exact = [torch.randn(HIDDEN_LAYERS, 200, HKV, D, generator=generator) * 2 for _ in "kv"]
        self.slots: list[list[int]] = [[], []] if prefix_of is None else [own[:shared] for own in prefix_of.slots]
        if prefix_of is not None:
            self.exact = prefix_of.exact
        self.generated_from = 200


class TwoPools:
    """`witcert_core.cache.protocols.Pool` of layers of two sizes."""

    def __init__(self) -> None:
        sizes = dict.fromkeys(FULL, SLOTS) | dict.fromkeys(WINDOWED, WINDOW_SLOTS)
        self.kv = {layer: [torch.full((n, HKV, D), torch.nan) for _ in "kv"] for layer, n in sizes.items()}

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (x[slots] for x in self.kv[layer])
        return k, v

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        for kept, new in zip(self.kv[layer], (k, v), strict=True):
            kept[slots] = new

    def restore(self, layer: int, slots: Tensor, head: int, k: Tensor, v: Tensor) -> None:
        raise AssertionError("no gate repairs here")


class Engine:
    """A model of these layers, driven pass by pass."""

    def __init__(self, quantizer: str, storage: str = "simulated", **sections: Any) -> None:
        meter = {"stride": 1, "max_rows": 4, "audit_every": 1, **sections.pop("meter", {})}
        policy = parse_policy(
            {"version": 1, "quantizer": {"name": quantizer, "storage": storage}, "meter": meter, **sections}
        )
        self.pool = TwoPools()
        full = Geometry("test", HQ, FULL, HQ, HKV, (0, 1), D, D, SLOTS, torch.float32, RotarySpec(D), "cpu")
        windowed = replace(full, layers=WINDOWED, num_slots=WINDOW_SLOTS, window=WINDOW_LEFT, null_slots=2)
        self.runtime = Runtime(
            "test", policy, full, self.pool, None, others=[windowed], num_hidden_layers=HIDDEN_LAYERS
        )
        self.free = [list(torch.randperm(SLOTS - 2) + 2), list(range(2, WINDOW_SLOTS))]
        self.queries = torch.Generator().manual_seed(4)
        self.compared = 0  # cells

    def step(self, new: dict[Request, int], generated: bool = False) -> StepCells:
        """One pass. What left a window in the passes before is forgotten first, and its slots are free."""
        starts = {request: len(request.slots[0]) for request in new}
        for request in new if generated else ():
            request.generated_from = min(request.generated_from, starts[request])
        for request, count in new.items():
            own = request.slots[1]
            for position in range(max(starts[request] - WINDOW_LEFT, 0)):
                if own[position]:
                    self.free[1].insert(0, own[position])
                    own[position] = 0
            for slots, free in zip(request.slots, self.free, strict=True):
                slots += [int(free.pop(0)) for _ in range(count)]
        tables = [[torch.tensor(request.slots[group]) for request in new] for group in (0, 1)]
        written = [
            torch.cat([own[-count:] for own, count in zip(table, new.values(), strict=True)]) for table in tables
        ]
        prefilling = None if generated else True
        passes = [RequestPass(r.name, own, n, prefilling) for (r, n), own in zip(new.items(), tables[0], strict=True)]
        self.runtime.begin(passes, written[0], [GroupSlots(tables[1], written[1])])
        asked = {}
        for layer in sorted((*FULL, *WINDOWED)):
            asked[layer] = self.attend(layer, new, starts, tables, written)
        step = self.runtime.end()
        assert step is not None
        self.compare(step, list(new), asked)
        step.count(self.runtime.ledger, set(range(len(new))))
        return step

    def attend(
        self, layer: int, new: dict[Request, int], starts: dict[Request, int], tables: list[Any], written: list[Tensor]
    ) -> Tensor:
        group = int(layer in WINDOWED)
        spec = spec_of(layer)
        q = torch.randn(sum(new.values()), HQ, D, generator=self.queries) * 2
        own = [torch.cat([r.exact[i][layer, starts[r] : starts[r] + n] for r, n in new.items()]) for i in (0, 1)]
        positions = torch.cat([torch.arange(starts[r], starts[r] + n) for r, n in new.items()])

        def run(k: Tensor | None, v: Tensor | None) -> Tensor:
            self.pool.write(layer, written[group], own[0] if k is None else k, own[1] if v is None else v)
            rows = [tables[group][i][: starts[r] + j + 1] for i, (r, n) in enumerate(new.items()) for j in range(n)]
            found = (
                attention(row, *self.pool.read(layer, spec.visible(seen)), spec)
                for row, seen in zip(q, rows, strict=True)
            )
            return torch.stack([out.float() for out, _ in found])

        self.runtime.attend(AttentionCall(layer, q, own[0], own[1], written[group], positions, spec, run))
        return q

    def compare(self, step: StepCells, requests: list[Request], asked: dict[int, Tensor]) -> None:
        """Audits agree with what was served, and rows that read what is stored differ by no more than their bounds."""
        for layer, cells in step.layers.items():
            assert cells.excess is not None
            assert cells.tv_audit is not None
            assert not (cells.excess > 0).any()
            assert (cells.tv_audit <= cells.meter).all()
            for number, row in enumerate(step.rows):
                request, spec = requests[row.request], spec_of(layer)
                if not self.reads_stored(request, row.position):
                    continue
                places = spec.visible(torch.arange(row.position + 1))
                slots = torch.tensor(request.slots[layer in WINDOWED])[places]
                served, weights = attention(asked[layer][row.token], *self.pool.read(layer, slots), spec)
                exact_k, exact_v = (x[layer, places] for x in request.exact)
                out, true = attention(asked[layer][row.token], exact_k, exact_v, spec)
                assert ((weights - true).abs().sum(-1) / 2 <= cells.meter[number]).all()
                assert ((served - out).norm(dim=-1) <= cells.out_bound[number]).all()
                self.compared += weights[:, 0].numel()

    def reads_stored(self, request: Request, position: int) -> bool:
        """Whether what a row read is what is there after its pass: of decode rows, and of all under `stored`."""
        return self.runtime.policy.prefill_reads == "stored" or position >= request.generated_from


def spec_of(layer: int) -> AttentionSpec:
    if layer in FULL:
        return AttentionSpec(D**-0.5)
    return AttentionSpec(D**-0.5, window_left=WINDOW_LEFT, sinks=SINKS)


def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Output [HQ, D] and weights [HQ, S] of a row [HQ, D], in float64."""
    weights = softmax_with_sink(spec.logits(q.double(), k.double()), spec.sinks)
    values = v.double().repeat_interleave(HQ // HKV, 1)
    return torch.einsum("hs,shd->hd", weights[:, : len(k)], values), weights


def played(engine: Engine) -> tuple[Request, Request]:
    """Two requests, chunks and generated tokens, until the first one's window has gone by several times."""
    a, b = Request(1), Request(2)
    engine.step({a: 17, b: 5})
    engine.step({a: 9})
    engine.step({b: 3})
    for _ in range(24):
        engine.step({a: 1, b: 1}, generated=True)
    return a, b


@pytest.mark.parametrize("reads", ["chunk_exact", "stored"])
@pytest.mark.parametrize("quantizer", ["int4_token_group", "int8_dither", "waits"])
def test_rows_of_all_groups_are_bounded(quantizer: str, reads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if quantizer == "waits":
        let_wait(monkeypatch)
    engine = Engine("int4_token_group" if quantizer == "waits" else quantizer, prefill_reads=reads)
    a, _ = played(engine)
    kept = [slot for slot in a.slots[1] if slot]
    assert len(kept) == WINDOW_LEFT + 1
    assert 0 in a.slots[1]
    assert engine.compared > 24 * 2 * 4 * HQ - 1
    found = engine.runtime.finish(a.name, "stop")
    assert found["audit"]["violations"] == found["audit"]["mismatches"] == 0
    assert found["audit"]["outputs"] > 24 * 4 * HQ - 1
    # Every layer's rows count alike, whatever group it is of; layers without a cache have no cell.
    cells = {entry["layer"]: entry["cells"] + entry["cells_exact"] for entry in found["by_layer"]}
    assert {cells[layer] for layer in (*FULL, *WINDOWED)} == {found["rows_metered"] * HQ}
    assert found["cells_unknown"] == found["unknown_reasons"].get("max_rows", 0)
    assert found["layers_excluded"] == {"2": "keeps no keys and values", "5": "keeps no keys and values"}


def test_layers_without_a_cache_are_named_and_spend_nothing() -> None:
    runtime = Engine("int8_dither").runtime
    assert runtime.without_cache == (2, 5)
    assert runtime.status()["layers_without_cache"] == [2, 5]
    assert runtime.status()["num_layers"] == runtime.budget.num_layers == 4
    assert "4 of 4 layers x 4 query heads" in banner_text(runtime, answers="", metrics="")
    assert "layers [2, 5]: they keep no keys and values" in banner_text(runtime, answers="", metrics="")


def test_slots_of_another_group_show() -> None:
    """A group that is announced with the slots of another is found out by what it reads."""
    engine = Engine("int4_token_group")
    a = Request(1)
    engine.step({a: 20})
    a.slots[1] = [slot % WINDOW_SLOTS for slot in a.slots[0]]
    with pytest.raises(AssertionError):
        engine.step({a: 1}, generated=True)


@pytest.mark.parametrize("group", [0, 1])
def test_a_prefix_that_some_group_has_sampled_spends_nothing(group: int) -> None:
    engine = Engine("int8_dither", meter={"tier": "probabilistic"})
    a = Request(1)
    engine.step({a: 8})
    for _ in range(3):
        engine.step({a: 1}, generated=True)
    b = Request(2, prefix_of=a, shared=8)
    sampled = [*a.slots[group][:7], a.slots[group][9]]
    b.slots[group] = sampled  # its last token of the prefix, where the other request sampled one
    step = engine.step({b: 2})
    assert step.without_law == {0: SAMPLED_PREFIX}
    c = Request(3, prefix_of=a, shared=7)
    assert engine.step({c: 2}).without_law == {}


def test_what_has_left_the_windows_does_not_end_the_law() -> None:
    engine = Engine("int8_dither", meter={"tier": "probabilistic"})
    a = Request(1)
    engine.step({a: 30})
    engine.step({a: 10})
    assert 0 in a.slots[1]
    assert not any(engine.step({a: 1}, generated=True).without_law for _ in range(4))


@pytest.mark.parametrize(
    ("quantizer", "sections", "said"),
    [
        ("int8_dither", {"gate": {"kind": "combined"}}, "gate.kind: combined with layers whose tokens leave"),
        ("int4_token_group", {"meter": {"audit_every": 0, "audit_share": 0.5}}, "meter.audit_share"),
        ("int4_token_group", {"meter": {"audit_every": 0, "sketch_share": 0.5}}, "meter.sketch_share"),
        ("int8_dither", {"storage": "packed"}, "quantizer.storage: packed"),
    ],
)
def test_what_needs_one_table_is_refused(quantizer: str, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        Engine(quantizer, **sections)


@pytest.mark.parametrize(
    ("waits", "said"),
    [
        ({"group": 8, "recent": 5}, "waits for 13 tokens over a window of 12"),
        ({"group": 1, "recent": 0, "calibration": 8}, "calibrates with layers whose tokens leave"),
    ],
)
def test_quantizers_that_wait_too_long_are_refused(
    waits: dict[str, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_wait(monkeypatch, **waits)
    with pytest.raises(UnsupportedError, match=said):
        Engine("int4_token_group")
