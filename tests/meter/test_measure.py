import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from audits import audit_of
from torch import Tensor

from witcert_core.cache import radii
from witcert_core.cache.bands import band_map
from witcert_core.cache.norm_codes import decode_norm, value_codes, witness_codes
from witcert_core.errors import InputError
from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.audit import true_tv
from witcert_core.meter.batching import MAX_ELEMENTS, batch_rows
from witcert_core.meter.bounds import FORM_NAMES, FORMS, extremal, meter
from witcert_core.meter.cells import CellBatch, bounds_of, sum_terms
from witcert_core.meter.kernel_error import SOFTMAX_FP32, KernelArithmetic, arithmetic_radius
from witcert_core.meter.measure import bound_cells, measure, measure_rows
from witcert_core.meter.sums import AccField
from witcert_core.meter.tv import attention_logits, softmax_with_sink, total_variation
from witcert_core.quantizers import dither
from witcert_core.quantizers.dither import DitherKey
from witcert_core.quantizers.rotary import RotarySpec

SCALE = 0.125
SPEC = AttentionSpec(SCALE)


class Store:
    """Radii of a small cache whose keys were quantized by one of three rules."""

    def __init__(
        self,
        tier: str,
        slots: int = 150,
        kv_heads: int = 2,
        dim: int = 64,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.tier = tier
        self.exact = torch.randn(slots, kv_heads, dim, generator=gen)
        self.exact_v = torch.randn(slots, kv_heads, dim, generator=gen)
        self.bands = band_map(RotarySpec(dim), 16)
        if tier == "witness":
            self.exact = self.exact.to(dtype)
            self.k = self.exact.float().to(torch.float8_e4m3fn).to(dtype)
            self.v = self.exact_v.to(torch.float8_e4m3fn).to(dtype)
            self.codes = witness_codes(self.exact, self.k, self.bands)
        else:
            u = dither.dither_vectors(DitherKey(seed, 1), torch.arange(1, slots + 1), 0, range(kv_heads), dim)
            codes, self.scales = dither.quantize_int8(self.exact, u)
            self.k = dither.dequantize_int8(codes, self.scales, u)
            self.v = dither.dequantize_int8(*dither.quantize_int8(self.exact_v, u), u)
            self.codes = dither.group_witness_codes(self.exact, self.k, self.scales)
        self.rho = decode_norm(value_codes(self.exact_v, self.v.float()))

    def key_radius(self, q: Tensor, slots: Tensor, sm_scale: float, delta_loc: float) -> Tensor:
        if self.tier == "witness":
            return radii.radius_witness(q, self.codes[slots], self.bands, sm_scale)
        if self.tier == "group":
            return radii.radius_group_witness(q, self.scales[slots], self.codes[slots], sm_scale)
        return radii.radius_dither(q, self.scales[slots], sm_scale, delta_loc, slots.numel())

    def value_radius(self, slots: Tensor) -> Tensor:
        return self.rho[slots]

    def residuals(self, slots: Tensor) -> None:
        return None

    def exact_heads(self, slots: Tensor) -> Tensor:
        return torch.zeros(len(slots), self.k.shape[1], dtype=torch.bool)


class Joint(Store):
    """The same, of several rows at once."""

    asked = 0

    def joint_key_radius(self, q: Tensor, slots: Tensor, sm_scale: float) -> Tensor:
        self.asked += 1
        return radii.radius_witness(q, self.codes[slots].flatten(1, 2), self.bands, sm_scale)


def run(
    store: Store, lengths: Sequence[int] = (150, 64, 7, 1), heads: int = 4, seed: int = 1, **options: Any
) -> tuple[Tensor, Tensor, Tensor, CellBatch]:
    gen = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    q = torch.randn(rows, heads, store.k.shape[-1], generator=gen).to(store.k.dtype)
    indptr = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    indices = torch.cat([torch.randperm(len(store.k), generator=gen)[:n] for n in lengths]).to(torch.int32)
    given: dict[str, Any] = {
        "kv_indptr": indptr,
        "kv_indices": indices,
        "radii": store,
        "spec": SPEC,
        "delta_loc": [1e-6] * rows,
        "exact_k": store.exact,
        "audit_rows": torch.ones(rows, dtype=torch.bool),
    }
    return q, indptr, indices, measure(q, store.k, store.v, **(given | options))


def exact_outputs(store: Store, q: Tensor, indices: Tensor, cap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
    """Output [H, D] from exact keys and values in float64, by a plain loop."""
    out = []
    for head in range(len(q)):
        kv = head // (len(q) // store.k.shape[1])
        z = SCALE * store.exact[indices, kv].double() @ q[head].double()
        z = cap * torch.tanh(z / cap) if cap else z
        v = store.exact_v[indices, kv].double()
        if sinks is not None:
            z, v = torch.cat((z, sinks[head : head + 1].double())), torch.cat((v, torch.zeros_like(v[:1])))
        out.append(torch.softmax(z, -1) @ v)
    return torch.stack(out)


def stored_outputs(store: Store, q: Tensor, indices: Tensor, **other: Any) -> Tensor:
    twin = Store.__new__(Store)
    twin.__dict__ = store.__dict__ | {"exact": store.k.float(), "exact_v": store.v.float()}
    return exact_outputs(twin, q, indices, **other)


@pytest.mark.parametrize("tier", ["witness", "group", "dither"])
@pytest.mark.parametrize("sink", [False, True], ids=["plain", "sink"])
@pytest.mark.parametrize("cap", [0.0, 3.0], ids=["uncapped", "capped"])
def test_no_audited_cell_and_no_output_passes_its_bound(tier: str, sink: bool, cap: float) -> None:
    store = Store(tier)
    sinks = torch.linspace(-2, 3, 4) if sink else None
    q, indptr, indices, cells = run(store, spec=AttentionSpec(SCALE, cap, sinks=sinks))
    assert bool((audit_of(cells) <= cells.meter).all())
    assert bool((audit_of(cells)[:3] > 1e-4).all())
    assert cells.num_visible.tolist() == [150, 64, 7, 1]
    for r in range(4):
        visible = indices[indptr[r] : indptr[r + 1]].long()
        stored = stored_outputs(store, q[r], visible, cap=cap, sinks=sinks)
        exact = exact_outputs(store, q[r], visible, cap=cap, sinks=sinks)
        torch.testing.assert_close(cells.out_norm[r], stored.norm(dim=-1))
        assert bool(((exact - stored).norm(dim=-1) <= cells.out_bound[r]).all())


def test_the_order_of_the_tiers() -> None:
    means = {tier: run(Store(tier))[3].meter[:3].mean().item() for tier in ("group", "dither")}
    hard = run(Store("dither"), delta_loc=[0.0] * 4)[3]
    assert means["dither"] < means["group"] < hard.meter[:3].mean()
    assert hard.delta_loc.tolist() == [0.0] * 4


@pytest.mark.parametrize("form", FORM_NAMES)
def test_every_form_can_be_asked_for(form: str) -> None:
    store = Store("witness")
    cells = run(store, form=form)[3]
    auto = run(store)[3]
    assert bool((cells.form == FORM_NAMES.index(form)).all())
    assert bool((audit_of(cells) <= cells.meter).all())
    if form != "extremal":
        value = FORMS[form](cells.acc).clamp(max=1.0)
        assert bool(((cells.meter - value).abs() < 1e-4).all())
        if form in ("tanh", "jensen", "needle"):
            assert bool((cells.meter >= auto.meter).all())
    else:
        assert bool((cells.meter[:2] <= auto.meter[:2] * (1 + 1e-9)).all())


def test_the_meter_is_the_bound_of_the_recomputed_weights_plus_the_kernels_arithmetic() -> None:
    store = Store("witness", slots=9)
    q, _, indices, cells = run(store, lengths=(9,), form="extremal")
    z = torch.einsum("hd,shd->hs", q[0].double(), store.k[indices.long()].double().repeat_interleave(2, 1)) * SCALE
    c = store.key_radius(q[0].double(), indices.long(), SCALE, 0.0)
    omega = arithmetic_radius(q[0], store.k[indices.long()], SCALE) + 2.0**-20 + 9 * 2.0**-27
    expected = extremal.bound(torch.softmax(z, -1), c) + torch.tanh(omega.amax(-1) / 2)
    torch.testing.assert_close(cells.meter[0], expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("cap", [0.0, 50.0])
def test_a_soft_cap_adds_the_rounding_of_its_own(cap: float) -> None:
    store = Store("witness", slots=9)
    q, _, indices, cells = run(store, lengths=(9,), spec=AttentionSpec(SCALE, cap))
    omega = arithmetic_radius(q[0], store.k[indices.long()], SCALE) + 2.0**-20 + 9 * 2.0**-27
    omega = omega + cap * 2.0**-21
    added = cells.meter[0] - meter(cells.acc)[0][0]
    torch.testing.assert_close(added, torch.tanh(omega.amax(-1) / 2), rtol=1e-9, atol=1e-15)


def test_an_exact_cache_costs_only_the_kernels_arithmetic() -> None:
    store = Store("witness")
    store.exact = store.k
    store.codes = torch.zeros_like(store.codes)
    cells = run(store)[3]
    assert bool((cells.meter < 1e-4).all())
    assert bool((cells.meter > 0.0).all())
    assert bool((audit_of(cells) <= cells.meter).all())


def test_sixteen_bit_caches_pay_for_the_cast_of_the_weights() -> None:
    plain, half = run(Store("witness"))[3], run(Store("witness", dtype=torch.bfloat16))[3]
    assert bool((half.meter[:3] > plain.meter[:3] + 0.5 * 2.0**-9 - 0.01).all())
    assert bool((half.meter[3] >= math.tanh(2.0**-9)).all())
    assert bool((audit_of(half) <= half.meter).all())


def test_a_window_sees_its_own_token_and_that_many_before() -> None:
    store = Store("witness")
    q, indptr, indices, cells = run(store, lengths=(150, 64, 7), spec=AttentionSpec(SCALE, window_left=9))
    assert cells.num_visible.tolist() == [10, 10, 7]
    last = indices[indptr[0] : indptr[1]][-10:]
    short = measure(
        q[:1],
        store.k,
        store.v,
        kv_indptr=torch.tensor([0, 10]),
        kv_indices=last,
        radii=store,
        spec=SPEC,
        delta_loc=[1e-6],
    )
    assert torch.equal(short.acc[0], cells.acc[0])
    assert short.tv_audit is None


@pytest.mark.parametrize("window", [-1, 9])
def test_quantized_tokens_are_counted_by_row_and_head(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows side by side, one of them alone, against counting one by one; a cell of exact tokens only counts 0."""
    store = Store("witness")
    exact = torch.zeros(*store.k.shape[:2], dtype=torch.bool)
    exact[::3, 0] = True
    exact[:, 1] = True  # every token of this head: its cells are exact
    monkeypatch.setattr(store, "exact_heads", lambda slots: exact[slots])
    _, indptr, indices, cells = run(store, lengths=(60, 64, 7, 1), spec=AttentionSpec(SCALE, window_left=window))
    for r, (first, last) in enumerate(itertools.pairwise(indptr.tolist())):
        seen = indices[first:last][-(window + 1) :] if window >= 0 else indices[first:last]
        counts = [sum(not exact[slot, head // 2] for slot in seen) for head in range(4)]
        assert cells.num_quantized[r].tolist() == counts
        assert counts[2:] == [0, 0]


def test_only_the_marked_rows_are_audited() -> None:
    marks = torch.tensor([False, True, False, False])
    cells = run(Store("witness"), audit_rows=marks)[3]
    assert audit_of(cells).isnan().all(-1).tolist() == [True, False, True, True]


@pytest.mark.parametrize("tier", ["witness", "group", "dither"])
@pytest.mark.parametrize("form", ["auto", "extremal"])
@pytest.mark.parametrize(
    "options",
    [{}, {"sinks": torch.linspace(-2, 3, 4)}, {"logits_soft_cap": 3.0, "window_left": 31}],
    ids=["plain", "sink", "capped"],
)
def test_a_row_beside_others_says_what_it_says_alone(tier: str, form: str, options: dict[str, Any]) -> None:
    store = Store(tier)
    store.k[3, 0, 0] = math.nan  # of some rows; the others must not notice
    lengths = (40, 33, 1, 36, 7, 150, 31, 2, 39)
    q, indptr, indices, together = run(store, lengths, form=form, spec=AttentionSpec(SCALE, **options))
    assert len(list(batch_rows([indices[:n] for n in lengths], 4 * 64))) < len(lengths)
    spoilt = 0
    for row in range(len(lengths)):
        seen = indices[indptr[row] : indptr[row + 1]]
        alone = measure(
            q[row : row + 1],
            store.k,
            store.v,
            kv_indptr=torch.tensor([0, len(seen)]),
            kv_indices=seen,
            radii=store,
            spec=AttentionSpec(SCALE, **options),
            delta_loc=[1e-6],
            form=form,
            exact_k=store.exact,
            audit_rows=torch.tensor([True]),
        )
        for field in dataclasses.fields(alone):
            mine, its = getattr(together, field.name)[row : row + 1], getattr(alone, field.name)
            torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-14, equal_nan=True)
        spoilt += int(alone.meter[0, 0] == 1.0)
    assert 0 < spoilt < len(lengths)


def test_joint_radii_are_those_of_each_row() -> None:
    lengths, certain = (40, 33, 36, 40, 40), [0.0] * 5
    joint = Joint("witness")
    cells, plain = (run(store, lengths, delta_loc=certain)[3] for store in (joint, Store("witness")))
    assert joint.asked == 1
    for field in dataclasses.fields(plain):
        mine, its = getattr(cells, field.name), getattr(plain, field.name)
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-15, equal_nan=True)
    run(joint, lengths)  # a failure probability is spent row by row
    run(joint, lengths=(40,), delta_loc=[0.0])
    assert joint.asked == 1


def test_rows_of_unlike_length_or_many_tokens_do_not_go_together() -> None:
    def lengths(tokens: Sequence[int], elements: int) -> list[list[int]]:
        return [batch.lengths for batch in batch_rows([torch.arange(n) for n in tokens], elements)]

    assert lengths((100, 300, 110, 125, 126), 1) == [[100, 110, 125], [126], [300]]
    assert lengths((100, 100, 100), MAX_ELEMENTS // 200) == [[100, 100], [100]]
    assert lengths((100, 100), MAX_ELEMENTS) == [[100], [100]]


def test_bounds_of_many_layers_at_once_are_those_of_each() -> None:
    store = Store("witness")
    gen = torch.Generator().manual_seed(3)
    options: dict[str, Any] = {"radii": store, "delta_loc": [0.0, 0.0]}
    layers = []
    for sinks, form in ((None, "auto"), (None, "auto"), (torch.zeros(4), "auto"), (None, "rms"), (None, "auto")):
        q = torch.randn(2, 4, 64, generator=gen)
        rows = [torch.arange(30), torch.arange(50)]
        spec = AttentionSpec(SCALE, sinks=sinks)
        layers.append(measure_rows(q, lambda s: (store.k[s], store.v[s]), rows, spec=spec, form=form, **options))
    together = bound_cells(layers)
    assert len(together) == 5
    for layer, cells in zip(layers, together, strict=True):
        (alone,) = bound_cells([layer])
        for field in ("acc", "meter", "form", "out_bound", "out_norm", "log_a", "floor"):
            assert torch.equal(getattr(cells, field), getattr(alone, field))
    assert not torch.equal(together[0].meter, together[1].meter)


def test_slots_that_are_not_visible_are_never_read() -> None:
    store = Store("witness")
    clean = run(store, lengths=(40,))
    unseen = torch.ones(150, dtype=torch.bool)
    unseen[clean[2].long()] = False
    for tensor in (store.k, store.v, store.exact, store.rho):
        tensor[unseen] = math.nan
    store.codes[unseen] = 255
    assert torch.equal(run(store, lengths=(40,))[3].acc, clean[3].acc)


@pytest.mark.parametrize("what", ["code", "key", "value", "query", "rho"])
def test_the_unknown_is_one_or_infinite_in_the_cells_that_see_it(what: str) -> None:
    store = Store("witness")
    slot = int(run(store, lengths=(40,))[2][5])
    if what == "code":
        store.codes[slot, 1, 3] = 255
    elif what == "key":
        store.k[slot, 1, 0] = math.nan
    elif what == "value":
        store.v[slot, 1, 0] = math.nan
    elif what == "rho":
        store.rho[slot, 1] = math.inf
    cells = run(store, lengths=(40, 20))[3]
    if what == "query":
        q, indptr, indices, _ = run(store, lengths=(40,))
        q[0, 2:, 0] = math.nan
        cells = measure(
            q,
            store.k,
            store.v,
            kv_indptr=indptr,
            kv_indices=indices,
            radii=store,
            spec=SPEC,
            delta_loc=[0.0],
        )
    spoilt, fine = cells.out_bound[0, 2:], cells.out_bound[0, :2]
    # With a meter of 1 and values that are known the output is still bounded, by their diameter.
    assert bool(spoilt.isfinite().all() if what == "code" else spoilt.isinf().all())
    assert bool(fine.isfinite().all())
    assert not bool(cells.out_bound.isnan().any())
    if what in ("code", "key", "query"):
        assert cells.meter[0, 2:].tolist() == [1.0, 1.0]
        assert cells.log_a[0, 2:].tolist() == [math.inf] * 2
    assert bool((cells.meter[0, :2] < 0.5).all())


def test_a_token_beyond_any_bound_is_told_by_log_a() -> None:
    store = Store("witness")
    store.codes[:, :, 0] = 230
    cells = run(store)[3]
    assert bool((cells.meter == 1.0).all())
    assert bool(cells.log_a.isfinite().all())
    assert bool((cells.log_a > 20).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": "median"}, "form is 'median'"),
        ({"delta_loc": [0.1]}, "delta_loc of 4"),
        ({"kv_indptr": torch.tensor([0, 1])}, "kv_indptr of 5"),
        ({"kv_indptr": torch.tensor([0, 3, 3, 4, 5])}, "row 1 sees no token"),
        ({"exact_k": None}, "exact_k is missing"),
        ({"kv_indptr": torch.tensor([0, 3, 2, 4, 5])}, "must rise"),
        ({"kv_indptr": torch.tensor([0, 3, 4, 5, 999])}, "over 222 indices"),
        ({"kv_indices": torch.full((222,), -1)}, "slots 0..149"),
        ({"kv_indices": torch.full((222,), 150)}, "slots 0..149"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        run(Store("witness"), **change)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((1, 4), (9, 2, 8), (9, 2, 8)),
        ((1, 3, 8), (9, 2, 8), (9, 2, 8)),
        ((1, 4, 8), (9, 2, 4), (9, 2, 8)),
        ((1, 4, 8), (9, 2, 8), (8, 2, 8)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    rows: dict[str, Any] = {"kv_indptr": torch.tensor([0, 1]), "kv_indices": torch.tensor([0]), "delta_loc": [0.0]}
    store = Store("witness", slots=9, dim=8)
    with pytest.raises(InputError, match="must be"):
        measure(torch.zeros(q), torch.zeros(k), torch.zeros(v), radii=store, spec=SPEC, **rows)


def test_infinite_fields_do_not_leak_into_finite_ones() -> None:
    cells = run(Store("witness"))[3]
    assert bool(cells.acc.isfinite().all())
    assert torch.equal(cells.log_a, cells.acc[..., AccField.LOG_A])


def test_float16_weights_too_small_to_hold_are_covered() -> None:
    """One token at logit 0, very many at -17.5: in float16 their weights vanish, 0.3 % of the mass."""
    count, below = 131072, -17.5
    z = torch.full((1, count), below, dtype=torch.float64)
    z[0, 0] = 0.0
    zero = torch.zeros_like(z)
    lost = float(torch.softmax(z, -1)[0, 1:].sum())
    assert float(torch.exp(z[0, 1:].float()).half().sum()) == 0.0
    v, rho = torch.zeros(count, 1, 1, dtype=torch.float64), torch.zeros(count, 1, dtype=torch.float64)
    for dtype, covered in ((torch.float16, True), (torch.float32, False)):
        arithmetic = KernelArithmetic.of(dtype)
        omega = torch.full_like(z, SOFTMAX_FP32 + arithmetic.cast_radius)
        terms = sum_terms(z, zero, omega, v, rho, arithmetic=arithmetic, num_tokens=count)
        assert bool(bounds_of(terms, "auto", False).meter >= lost) is covered


def test_the_truth_is_never_above_one() -> None:
    """Once a violation: float32 weights summed to 1 + 1e-9, disjoint from the exact ones, under a bound of 1."""
    above = 0
    for seed in range(60):
        g = torch.Generator().manual_seed(seed)
        q = torch.ones(1, 8)
        stored = torch.randn(40, 1, 8, generator=g) * 0.3
        exact = stored - 30.0
        exact[7] = 30.0  # the exact run looks at one token, the compressed one at all others
        stored[7] = -30.0
        single = softmax_with_sink(attention_logits(q, stored, 1.0))
        truth = softmax_with_sink(attention_logits(q.double(), exact.double(), 1.0))
        above += float(total_variation(truth, single)) > 1.0
        assert true_tv(q, stored, exact, AttentionSpec(1.0)).item() <= 1.0
    assert above > 0, "no case of the kind was drawn"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sm_scale": 0.0}, "sm_scale is 0.0; expected a finite number that is not 0"),
        ({"sm_scale": float("nan")}, "sm_scale is nan"),
        ({"logits_soft_cap": -30.0}, "logits_soft_cap is -30.0; expected 0 for none"),
        ({"logits_soft_cap": float("inf")}, "logits_soft_cap is inf"),
    ],
)
def test_an_attention_that_cannot_be_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        AttentionSpec(**{"sm_scale": SCALE, **changes})
