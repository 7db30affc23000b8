"""A cache simulated in the engine's pool: cells from `certify` over the page table against the reference meter's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from audits import audit_of
from layer_pool import LayerPool
from torch import Tensor

from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.tv import attention_logits, softmax_with_sink
from witcert_core.policy.model import parse_policy
from witcert_core.quantizers.rotary import RotarySpec
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.device.certify import KernelSums
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.runtime import Runtime
from witcert_core.serving.steps import StepCells
from witcert_core.serving.storage.acts import Gating, Observing, TorchSums

from .two_requests import Pass, TwoRequests, built_for

pytestmark = pytest.mark.usefixtures("kernels")

HQ, HKV, D, SLOTS, LAYER = 4, 2, 64, 150, 0
SCALE = D**-0.5
PASSES: list[Pass] = [
    [(40, False), (13, False)],  # cold chunks
    [(1, True), (3, False)],  # a decode row beside a chunk over a prefix
    [(2, True), (1, True)],  # a chunk that reads what is stored
]


class PlainPool(LayerPool):
    """As the engine's, with nothing in it."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu") -> None:
        super().__init__(*(torch.full((SLOTS, HKV, D), float("nan"), dtype=dtype, device=device) for _ in "kv"))


class Served:
    """One layer served pass by pass by an engine that attends in float32 over its own pool."""

    checks_outputs = True  # whether a pass fails where an audited output is not attention over what is stored

    def __init__(
        self,
        who: str,
        name: str,
        dtype: torch.dtype,
        pool: Any = None,
        device: str = "cpu",
        **sections: Any,
    ) -> None:
        self.gen = torch.Generator().manual_seed(3)
        meter = {"stride": 1, "audit_every": 1, "max_rows": 2, **sections.pop("meter", {})}
        policy = parse_policy({"version": 1, "quantizer": {"name": name}, "meter": meter, **sections})
        geometry = Geometry("test", HQ, (LAYER,), HQ, HKV, (0, 1), D, D, SLOTS, dtype, RotarySpec(D), device)
        self.dtype = dtype
        self.pool = PlainPool(dtype, device) if pool is None else pool
        with pytest.MonkeyPatch.context() as patch, built_for(who):
            patch.setattr("secrets.randbits", lambda _bits: 5)  # two runs with the same dither
            self.runtime = Runtime("test", policy, geometry, self.pool, None)
        self.requests = TwoRequests(SLOTS, self.gen, device)

    @property
    def who(self) -> type:
        """What sums over the rows."""
        acts = self.runtime.groups[0].cache.acts
        return type(acts.summer) if isinstance(acts, Observing) else type(acts)

    def step(self, new: Pass, **options: Any) -> tuple[StepCells, Tensor]:
        """One pass; its cells and outputs [N, HQ, D]."""
        total = sum(n for n, _ in new)
        drawn = [torch.randn(total, h, D, generator=self.gen) * 2 for h in (HQ, HKV, HKV)]
        q, k, v = (x.to(self.requests.device, self.dtype) for x in drawn)
        spans, of_pass = self.requests.begin(self.runtime, new)

        def run(own_k: Tensor | None, own_v: Tensor | None) -> Tensor:
            self.pool.write(LAYER, of_pass["slots"], k if own_k is None else own_k, v if own_v is None else own_v)
            rows = [(i, p) for i, s in enumerate(spans) for p in s]
            return torch.stack([self.attend(q[t], i, p, **options) for t, (i, p) in enumerate(rows)]).to(self.dtype)

        call = AttentionCall(
            layer=LAYER,
            q=q,
            exact_k=k,
            exact_v=v,
            spec=AttentionSpec(SCALE, **options),
            run=run,
            **of_pass,
        )
        out = self.runtime.attend(call)
        step = self.runtime.end()
        assert step is not None
        found = [cells.excess for cells in step.layers.values() if cells.excess is not None]
        assert not self.checks_outputs or not any((excess > 0).any() for excess in found)
        return step, out

    def attend(
        self,
        q: Tensor,
        request: int,
        position: int,
        window_left: int = -1,
        logits_soft_cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        first = max(position - window_left, 0) if window_left >= 0 else 0
        k, v = (x.float() for x in self.pool.read(LAYER, self.requests.slots[request, first : position + 1]))
        weights = softmax_with_sink(attention_logits(q.float(), k, SCALE, logits_soft_cap), sinks)[:, : len(k)]
        return torch.einsum("kgs,skd->kgd", weights.reshape(HKV, HQ // HKV, -1), v).flatten(0, 1)


@pytest.mark.parametrize(
    ("name", "dtype", "options", "sections"),
    [
        ("int4_token_group", torch.float32, {}, {}),
        ("fp8_e4m3_cast", torch.float16, {"window_left": 6}, {"meter": {"bands": 32}}),
        ("int8_dither", torch.float32, {"logits_soft_cap": 20.0, "sinks": torch.linspace(-1, 3, HQ)}, {}),
        ("int8_dither", torch.float16, {}, {"meter": {"tier": "deterministic"}}),
        ("kivi", torch.float16, {}, {"prefill_reads": "stored"}),
    ],
)
def test_certify_says_what_the_reference_says(
    name: str, dtype: torch.dtype, options: dict[str, Any], sections: dict[str, Any]
) -> None:
    """Equal pools, outputs and side tensors; bounds near the reference's, none below the truth."""
    ours, theirs = (Served(who, name, dtype, **sections) for who in ("kernels", "torch"))
    assert (ours.who, theirs.who) == (KernelSums, TorchSums)
    for new in PASSES:
        if sections.get("prefill_reads"):
            new = [(count, True) for count, _ in new]
        (mine, out), (other, expected) = ours.step(new, **options), theirs.step(new, **options)
        assert torch.equal(ours.pool.k.nan_to_num(), theirs.pool.k.nan_to_num())
        assert torch.equal(out, expected)
        assert mine.rows == other.rows
        assert mine.layers.keys() == other.layers.keys()
        assert mine.deterministic_layers.keys() == other.deterministic_layers.keys()
        for layers, wanted in ((mine.layers, other.layers), (mine.deterministic_layers, other.deterministic_layers)):
            if not layers:
                continue
            cells, reference = layers[LAYER], wanted[LAYER]
            near = 1e-3 if dtype == torch.float32 else 1e-2
            assert torch.allclose(cells.meter, reference.meter, rtol=2e-2, atol=near)
            assert (cells.out_bound >= reference.out_bound * 0.5).all()
            assert torch.equal(cells.num_visible, reference.num_visible)
            assert torch.equal(cells.num_quantized, reference.num_quantized)
            assert torch.equal(cells.delta_loc, reference.delta_loc)
            assert (cells.out_norm <= reference.out_norm).all()
            assert torch.allclose(cells.out_norm, reference.out_norm, rtol=2e-2)
        if mine.layers:
            cells, truth = mine.layers[LAYER], audit_of(other.layers[LAYER])
            assert torch.allclose(audit_of(cells), truth, atol=1e-9)
            assert (audit_of(cells) <= cells.meter).all()
            assert (cells.floor == 0).all()
    assert (cells.meter < 1).any()


def test_what_certify_does_not_know_is_left_to_the_reference() -> None:
    for name, sections in (
        ("int4_token_group", {"meter": {"sketch_bits": 4}}),
        ("int4_token_group", {"meter": {"form": "extremal"}}),
        ("int8_dither_w", {}),
    ):
        assert Served("kernels", name, torch.float32, **sections).who is TorchSums
    assert Served("kernels", "int4_token_group", torch.float32, gate={"kind": "certified"}).who is Gating


def test_slots_never_written_are_unknown() -> None:
    ours = Served("kernels", "int4_token_group", torch.float32)
    ours.step(PASSES[0])
    ours.runtime.overwritten(ours.requests.slots[1, 4:5])
    step, _ = ours.step([(1, True), (1, True)])
    assert (step.layers[LAYER].meter[0] < 1).all()
    assert (step.layers[LAYER].meter[1] == 1).all()
    assert step.layers[LAYER].out_bound[1].isinf().all()
