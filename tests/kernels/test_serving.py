"""The packed cache of the serving runtime: kernels against its reference, pass by pass, and against exact attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from audits import audit_of
from torch import Tensor

from witcert_core.cache.outliers import outlier_channels, taken
from witcert_core.cache.packed import PackedLayer
from witcert_core.errors import UnsupportedError
from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.tv import attention_logits, softmax_with_sink, total_variation
from witcert_core.policy.model import parse_policy
from witcert_core.quantizers.rotary import RotarySpec
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.runtime import Runtime
from witcert_core.serving.steps import StepCells
from witcert_core.serving.storage.packed import PackedStorage

from .two_requests import Pass, TwoRequests, built_for

pytestmark = pytest.mark.usefixtures("kernels")

HQ, HKV, D, SLOTS, LAYER = 4, 2, 64, 150, 0
SCALE = D**-0.5
GATE: dict[str, Any] = {"kind": "certified", "tau": 0.05, "block_size": 4}


class Served:
    """One layer of a model served pass by pass; every exact key and value is at hand."""

    def __init__(
        self,
        who: str,
        name: str,
        device: str = "cpu",
        gate: dict[str, Any] | None = None,
        report: dict[str, Any] | None = None,
        **meter: Any,
    ) -> None:
        self.gen = torch.Generator().manual_seed(3)
        settings = {"stride": 1, "audit_every": 1, "max_rows": 1, **meter}
        chosen = {"name": name, "storage": "packed"}
        sections = {"quantizer": chosen, "meter": settings, "gate": gate or {}, "report": report or {}}
        policy = parse_policy({"version": 1, **sections})
        quantizer = policy.resolved_quantizer
        geometry = Geometry("test", HQ, (LAYER,), HQ, HKV, (0, 1), D, D, SLOTS, torch.float32, RotarySpec(D), device)

        def side(width: int, value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((SLOTS, HKV, width), value, dtype=dtype, device=device)

        self.layer = PackedLayer(
            side(D, 77, torch.int8),
            side(D, 77, torch.int8),
            side(2, float("inf"), torch.float16),
            side(2, float("inf"), torch.float16),
            side(2, 255, torch.uint8) if quantizer.stored_witness else None,
            side(2 * quantizer.bypass_pairs, float("nan"), torch.float32) if quantizer.bypass_pairs else None,
        )
        with built_for(who):
            self.runtime = Runtime("test", policy, geometry, {LAYER: self.layer}, None)
        self.runtime.groups[0].encoder.dither_key = type(self.runtime.groups[0].encoder.dither_key)(0, 5, 0)
        self.storage.cache.key = self.runtime.groups[0].encoder.dither_key
        self.requests = TwoRequests(SLOTS, self.gen, device)
        self.exact = {x: torch.zeros(2, 70, HKV, D) for x in "kv"}

    @property
    def storage(self) -> PackedStorage:
        storage = self.runtime.groups[0].cache.storage
        assert isinstance(storage, PackedStorage)
        return storage

    def step(
        self, new: Pass, through: Callable[[AttentionCall], Tensor] | None = None, **options: Any
    ) -> tuple[StepCells, Tensor, Tensor]:
        """One pass; returns its cells, the queries [N, HQ, D] and outputs [N, HQ, D]. through: in attention's place."""
        total = sum(n for n, _ in new)
        q, k, v = (torch.randn(total, h, D, generator=self.gen) * 2 for h in (HQ, HKV, HKV))
        k[..., 5] *= 20
        spans, of_pass = self.requests.begin(self.runtime, new)
        done = 0
        for i, s in enumerate(spans):
            for x, part in (("k", k), ("v", v)):
                self.exact[x][i, s.start : s.stop] = part[done : done + len(s)]
            done += len(s)
        device = self.requests.device
        call = AttentionCall(
            layer=LAYER,
            q=q.to(device),
            exact_k=k.to(device),
            exact_v=v.to(device),
            spec=AttentionSpec(SCALE, **options),
            run=lambda *_: pytest.fail("the packed cache attends by itself"),
            **of_pass,
        )
        out = (through or self.runtime.attend)(call).view(total, HQ, D)
        step = self.runtime.end()
        assert step is not None
        if through is None and self.runtime.policy.meter.audit_every:
            assert all(cells.excess is not None and not (cells.excess > 0).any() for cells in step.layers.values())
        return step, q, out

    def truth(self, request: int, position: int, q: Tensor, own_from: int, **options: Any) -> tuple[Tensor, ...]:
        """True TV and output error [HQ] of a row whose request reads tokens from `own_from` on exactly."""
        slots = self.requests.slots[request, : position + 1]
        stored = dict(zip("kv", self.storage.cache.read(LAYER, slots), strict=True))
        exact = {x: self.exact[x][request, : position + 1] for x in "kv"}
        first = position - options["window_left"] if options.get("window_left", -1) >= 0 else 0
        sinks = options.get("sinks")
        weights, outs = [], []
        for source in (exact, stored):
            k, v = (torch.cat([source[x][:own_from], exact[x][own_from:]])[max(first, 0) :].double() for x in "kv")
            logits = attention_logits(q.double(), k, SCALE, options.get("logits_soft_cap", 0.0))
            w = softmax_with_sink(logits, None if sinks is None else sinks.double())
            weights.append(w)
            outs.append(torch.einsum("kgs,skd->kgd", w[:, : len(k)].reshape(HKV, HQ // HKV, -1), v).flatten(0, 1))
        return total_variation(*weights), (outs[0] - outs[1]).norm(dim=-1), outs[1]


PASSES: list[Pass] = [
    [(9, False), (13, False)],  # cold chunks
    [(1, True), (3, False)],  # a decode row beside a chunk over a prefix
    [(2, True), (1, True)],  # a chunk that reads what is stored
]


def layers_equal(a: PackedLayer, b: PackedLayer) -> None:
    for name in ("k", "v", "k_scale", "v_scale", "k_witness", "k_bypass"):
        x, y = getattr(a, name), getattr(b, name)
        if name == "k_witness" and x is not None:  # rounded up from fp32 in the kernel
            assert ((y.int() - x.int()).abs() <= 1).all()
        elif x is not None:
            assert torch.equal(x.nan_to_num(), y.nan_to_num()), name


@pytest.mark.parametrize("name", ["int8_dither", "int8_dither_w", "int8_dither_bypass"])
def test_kernels_serve_what_the_reference_serves(name: str) -> None:
    """Equal codes, outputs but for fp32, and bounds near each other on the same rows; none below the truth."""
    ours, theirs = Served("kernels", name), Served("torch", name)
    assert ours.storage.kernels is not None
    assert theirs.storage.kernels is None
    for new in PASSES:
        starts = list(ours.requests.lens)
        (mine, q, out), (other, _, expected) = ours.step(new), theirs.step(new)
        layers_equal(theirs.layer, ours.layer)
        assert torch.allclose(out, expected, atol=2e-5)
        assert [r.token for r in mine.rows] == [r.token for r in other.rows]
        if not mine.rows:
            continue
        cells, reference = mine.layers[LAYER], other.layers[LAYER]
        assert torch.allclose(audit_of(cells), audit_of(reference), atol=1e-5)
        assert torch.allclose(cells.meter, reference.meter, rtol=2e-2, atol=1e-3)  # that adds the engine's kernel
        assert (cells.out_bound <= reference.out_bound * 2.5).all()  # of sums alone, which know no directions
        assert torch.equal(cells.num_visible, reference.num_visible)
        assert torch.equal(cells.num_quantized, reference.num_quantized)
        assert torch.equal(cells.delta_loc, reference.delta_loc)
        assert (mine.deterministic_layers[LAYER].meter >= cells.meter * (1 - 1e-3)).all()
        for i, row in enumerate(mine.rows):
            stored = new[row.request][1]
            own_from = row.position + 1 if stored else starts[row.request]
            tv, moved, served = ours.truth(row.request, row.position, q[row.token], own_from)
            assert torch.allclose(out[row.token].double(), served, atol=2e-5)
            assert (tv <= cells.meter[i]).all()
            assert (tv <= mine.deterministic_layers[LAYER].meter[i]).all()
            assert (moved <= cells.out_bound[i]).all()
            assert (cells.out_norm[i] <= served.norm(dim=-1) * (1 + 1e-9)).all()


@pytest.mark.parametrize(
    "options",
    [
        {"window_left": 6},
        {"logits_soft_cap": 20.0, "sinks": torch.linspace(-1, 3, HQ)},
    ],
    ids=["window", "cap and sinks"],
)
def test_what_only_kernels_attend_to(options: dict[str, Any]) -> None:
    ours = Served("kernels", "int8_dither")
    for new in PASSES:
        starts = list(ours.requests.lens)
        step, q, out = ours.step(new, **options)
        for i, row in enumerate(step.rows):
            own_from = row.position + 1 if new[row.request][1] else starts[row.request]
            tv, moved, served = ours.truth(row.request, row.position, q[row.token], own_from, **options)
            cells = step.layers[LAYER]
            assert torch.allclose(out[row.token].double(), served, atol=2e-5)
            assert (tv <= cells.meter[i]).all()
            assert (audit_of(cells)[i] <= cells.meter[i]).all()
            assert (cells.meter[i] < 0.95).all()
            assert (moved <= cells.out_bound[i]).all()


def test_rows_between_the_stride_are_attended_and_not_measured() -> None:
    ours = Served("kernels", "int8_dither", stride=2)
    ours.step(PASSES[0])
    counts = [len(ours.step([(1, True), (1, True)])[0].rows) for _ in range(3)]
    assert counts == [2, 0, 2]


def test_slots_never_written_are_unknown() -> None:
    ours = Served("kernels", "int8_dither")
    ours.step(PASSES[0])
    assert ours.storage.kernels is not None
    for rows in (ours.storage.kernels.pass_bits, ours.runtime.groups[0].pass_ids):
        rows[ours.requests.slots[1, 4]] = 0
    step, _, _ = ours.step([(1, True), (1, True)])
    assert (step.layers[LAYER].meter[0] < 1).all()
    assert (step.layers[LAYER].meter[1] == 1).all()


@pytest.mark.parametrize("who", ["kernels", "torch"])
def test_outliers_are_chosen_again_from_a_longer_pass(who: str) -> None:
    """A warm-up of a few tokens does not decide; what it and its answer left behind is written again, as if it had."""
    served = Served(who, "int8_dither_bypass")
    served.step([(3, False), (2, False)])
    first = served.layer.channels
    for new in ([(1, True), (1, True)], [(60, False), (40, False)], [(1, True), (1, True)]):
        step, q, _ = served.step(new)
    final = served.layer.channels
    assert first is not None
    assert final is not None
    assert not torch.equal(first, final)
    lens = (64, 43)
    seen = torch.cat([served.exact["k"][i, :n] for i, n in enumerate(lens)])
    assert torch.equal(final, outlier_channels(seen, RotarySpec(D), final.shape[1] // 2))
    for request, n in enumerate(lens):
        stored, _ = served.storage.cache.read(LAYER, served.requests.slots[request, :n])
        exact = served.exact["k"][request, :n]
        assert torch.equal(taken(stored, final), taken(exact, final))
        steps = served.layer.k_scale[served.requests.slots[request, :n]].double().repeat_interleave(32, -1)
        assert ((stored - exact).abs() <= steps * 0.5001).all()
    for number, row in enumerate(step.rows):
        tv, _, _ = served.truth(row.request, row.position, q[row.token], own_from=70)
        assert (tv <= step.layers[LAYER].meter[number]).all()
    served.step([(3, True), (2, True)])
    assert served.layer.channels is final


def test_a_gate_acts_beside_kernels() -> None:
    """Codes by kernels; bounds within the gate's target after repairs, and outputs of rows that read exact blocks."""
    gated, in_torch = (Served(who, "int8_dither", gate=GATE) for who in ("kernels", "torch"))
    plain = Served("torch", "int8_dither")
    assert gated.storage.kernels is not None
    for new in [*PASSES, [(1, True), (1, True)]]:
        (mine, _, out), (same, _, expected), (other, _, unrepaired) = (x.step(new) for x in (gated, in_torch, plain))
        layers_equal(in_torch.layer, gated.layer)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=0.0)
        for layer, cells in same.layers.items():
            assert torch.equal(mine.layers[layer].meter, cells.meter)
        assert [v.repaired_blocks for v in mine.verdicts] == [v.repaired_blocks for v in same.verdicts]
    repaired, damaged = mine.layers[LAYER].meter, other.layers[LAYER].meter
    assert repaired.max() <= GATE["tau"] < damaged.max()
    assert not torch.allclose(out, unrepaired, atol=1e-4)


def test_what_kernels_cannot_do_is_refused_but_on_a_cpu_where_torch_does_it(kernels: str) -> None:
    if kernels == "cpu":
        served = Served("kernels", "int8_dither", form="extremal")
        assert served.storage.kernels is None
        assert served.runtime.status()["kernels"].startswith("plain torch: meter.form 'extremal' needs every token")
        return
    with pytest.raises(UnsupportedError, match=r"meter\.form is 'extremal'"):
        Served("kernels", "int8_dither", form="extremal")
