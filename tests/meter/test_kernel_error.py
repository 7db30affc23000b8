"""What a kernel's own arithmetic does is inside the bounds: casts, lost mass, sums in float32, the output's dtype."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from witcert_core.cache.bands import band_map
from witcert_core.cache.witness_store import WitnessStore
from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.kernel_error import (
    KernelArithmetic,
    attention_error,
    kernel_radius,
    mass_error,
    merge_radius,
    output_error,
)
from witcert_core.meter.measure import bound_cells, measure_rows
from witcert_core.meter.sums import AccField
from witcert_core.meter.tv import softmax_with_sink
from witcert_core.policy.model import parse_policy
from witcert_core.quantizers.rotary import RotarySpec

HALVES = (torch.bfloat16, torch.float16)


def rounded(x: Tensor, dtype: torch.dtype, truncates: bool = False) -> Tensor:
    """Float32 x in a dtype and back, to nearest or towards zero."""
    if dtype == torch.bfloat16 and truncates:
        return (x.contiguous().view(torch.int32) & -65536).view(torch.float32)
    return x.to(dtype).float()


def served(z: Tensor, v: Tensor, arithmetic: KernelArithmetic, sink: Tensor | None = None) -> Tensor:
    """What a flash kernel hands on [C, Dv], one token after the other: z [C, S] float32 logits, v [S, Dv]."""
    top = z.amax(-1, keepdim=True)
    w = (z - top).exp()
    total, out = torch.zeros(len(z)), torch.zeros(len(z), v.shape[1])
    met = w
    for dtype in arithmetic.weights:
        met = rounded(w, dtype, arithmetic.truncates)
    for t in range(z.shape[1]):
        total = total + w[:, t]
        out = out + met[:, t, None] * v[t].float()
    if sink is not None:
        total = total + (sink - top[:, 0]).exp()
    return rounded(out / total[:, None], arithmetic.output, arithmetic.truncates).double()


def least_cast(dtype: torch.dtype) -> float:
    """Weights a little above a half, which rounding to nearest brings down to it."""
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    return math.log(0.5 * (1 + unit - unit / 8))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_mass_that_casting_weights_loses_is_in_the_output_bound(dtype: torch.dtype) -> None:
    """Equal values and nothing quantized: no weight can move the output, but their sum is not 1."""
    dim, count = 64, 1000
    k, v = torch.zeros(count, 1, dim, dtype=dtype), torch.full((count, 1, dim), 1.9921875, dtype=dtype)
    k[1:, 0, 0] = least_cast(dtype)
    q = torch.zeros(1, 1, dim, dtype=dtype)
    q[..., 0] = 1.0
    store = WitnessStore(
        quantizer=parse_policy({"version": 1, "quantizer": {"name": "none"}}).resolved_quantizer,
        layers=[0],
        num_slots=count,
        num_kv_heads=1,
        head_dim=dim,
        v_head_dim=dim,
        bands=band_map(RotarySpec(dim)),
        storage_dtype=dtype,
    )
    slots = torch.arange(count)
    store.write(0, slots, exact_k=k, exact_v=v, stored_k=k, stored_v=v)
    z = (k[:, 0].float() @ q[0, 0].float())[None]
    out = served(z, v[:, 0], KernelArithmetic((dtype,), torch.float32))  # before it is rounded, maybe back again
    exact = z.double().softmax(-1) @ v[:, 0].double()
    moved = (out - exact).norm()
    summed = measure_rows(
        q,
        lambda s: (k[s], v[s]),
        [slots],
        radii=store[0],
        spec=AttentionSpec(1.0, arithmetic=replace(KernelArithmetic.of(dtype), merges=False)),
        delta_loc=[0.0],
        form="auto",
    )
    cells = bound_cells([summed])[0]
    assert moved > 0.4 * KernelArithmetic.of(dtype).cast_unit * exact.norm()
    assert 2.0 * cells.acc[0, 0, AccField.V_RADIUS] < 1e-2 * moved, "the values have a diameter"
    assert moved <= cells.out_bound.item() <= 6 * moved


@pytest.mark.parametrize("sink", [False, True], ids=["plain", "sink"])
@pytest.mark.parametrize(
    "arithmetic",
    [
        KernelArithmetic.of(torch.float32),
        KernelArithmetic.of(torch.bfloat16),
        KernelArithmetic.of(torch.float16),
        KernelArithmetic((), torch.bfloat16, truncates=True),
        KernelArithmetic((torch.bfloat16,), torch.bfloat16, truncates=True),
    ],
    ids=["float32", "bfloat16", "float16", "truncated outputs", "truncated weights"],
)
def test_no_kernel_hands_on_more_than_the_error_of_its_arithmetic(arithmetic: KernelArithmetic, sink: bool) -> None:
    gen = torch.Generator().manual_seed(7)
    closest = 0.0
    for trial in range(30):
        dim, count = 32, (3, 60, 700)[trial % 3]
        q = rounded(torch.randn(4, dim, generator=gen), arithmetic.output)
        k = rounded(torch.randn(count, 1, dim, generator=gen), arithmetic.output)
        v = torch.randn(count, 1, dim, generator=gen) * (0.02, 1.0, 300.0)[trial % 3]
        v = v * torch.rand(1, generator=gen) + torch.randn(1, generator=gen) * v.abs().amax()
        v = rounded(v, arithmetic.output)
        sinks = torch.randn(4, generator=gen) if sink else None
        z = torch.einsum("hd,sd->hs", q, k[:, 0]) * 0.3
        exact = torch.einsum("hd,sd->hs", q.double(), k[:, 0].double()) * 0.3
        weights = softmax_with_sink(exact, sinks)
        out = served(z, v[:, 0], arithmetic, sinks)
        omega = kernel_radius(q.double(), k, 0.3, 0.0, arithmetic)
        bound = attention_error(weights, v, omega, num_tokens=count, arithmetic=arithmetic)
        moved = (out - weights[:, :count] @ v[:, 0].double()).norm(dim=-1)
        assert bool((moved <= bound).all())
        closest = max(closest, float((moved / bound).max()))
    assert closest > 0.002, "a bound that no arithmetic comes near"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_parts_that_cancel_after_their_own_rounding_are_allowed_for(dtype: torch.dtype) -> None:
    """Two halves of the tokens, each rounded as an output before both are merged, and nearly opposite."""
    unit, one = KernelArithmetic((), dtype).output_unit, KernelArithmetic((), dtype)
    v = torch.tensor([1.0 + unit * 0.99, -1.0]).reshape(2, 1, 1)
    weights = torch.full((1, 2), 0.5, dtype=torch.float64)
    parts = [rounded(v[i, 0], dtype).double() for i in range(2)]
    moved = (0.5 * (parts[0] + parts[1]) - 0.5 * v[:, 0].double().sum(0)).abs().item()
    assert moved > 0.4 * unit
    zero = torch.zeros(1, dtype=torch.float64)

    def bound(arithmetic: KernelArithmetic) -> float:
        out = weights @ v[:, 0].double()
        found = output_error(
            zero,
            num_tokens=2,
            norm=out.norm(dim=-1),
            mean_norm=weights @ v.double().norm(dim=-1)[:, 0],
            max_norm=zero + 2.0,
            diameter=zero + 4.0,
            v_dim=1,
            arithmetic=arithmetic,
        )
        return float(found)

    assert bound(one) < moved <= bound(replace(one, merges=True)) < 4 * unit
    assert KernelArithmetic.of(dtype).merges
    assert not KernelArithmetic.of(torch.float32).merges


def test_sixteen_bits_are_told_apart() -> None:
    """float16 has eight times the precision of bfloat16; what dtypes do not say is taken for bfloat16."""
    half, wide, single = (KernelArithmetic.of(x) for x in (torch.float16, torch.bfloat16, torch.float32))
    assert (half.cast_unit, wide.cast_unit, single.cast_unit) == (2.0**-11, 2.0**-8, 0.0)
    assert KernelArithmetic.of(torch.float16, torch.float8_e4m3fn) == half
    assert KernelArithmetic.of(torch.float32, torch.float8_e4m3fn).weights == (torch.bfloat16,)
    assert KernelArithmetic.of(torch.float16, torch.bfloat16).weights == (torch.bfloat16,)
    assert mass_error(1000, half) < 2.0**-10 < mass_error(1000, wide)


def test_what_is_not_known_of_values_is_unknown_of_outputs() -> None:
    weights = torch.full((1, 4), 0.25, dtype=torch.float64)
    omega = torch.full((1, 4), 1e-6, dtype=torch.float64)
    v = torch.ones(4, 1, 8)
    v[2, 0, 3] = math.nan
    found = attention_error(weights, v, omega, num_tokens=4, arithmetic=KernelArithmetic.of(torch.float32))
    assert found.item() == math.inf


@pytest.mark.parametrize("size", [0.0, 3.0, 60.0])
@pytest.mark.parametrize("num_tokens", [16, 300, 8192])
def test_parts_merged_by_the_logarithm_of_their_sums_stay_within_their_radius(num_tokens: int, size: float) -> None:
    """As in vLLM's latent attention on a CPU: 16 tokens at a time in float32; each part's mass against float64."""
    generator = torch.Generator().manual_seed(num_tokens)
    logits = (torch.rand(num_tokens, generator=generator) * 2 - 1) * size
    parts = logits.split(16)
    mass, lse = torch.zeros(len(parts)), torch.tensor(-torch.finfo(torch.float32).max)
    for number, part in enumerate(parts):
        own = (part - part.max()).exp().sum().log() + part.max()
        largest = torch.maximum(lse, own)
        before, after = (lse - largest).exp(), (own - largest).exp()
        mass = mass * (before / (before + after))
        mass[number] = after / (before + after)
        lse = (before + after).log() + largest
    truth = torch.stack([part.double().exp().sum() for part in parts])
    truth = truth / truth.sum()
    allowed = merge_radius(torch.tensor(size, dtype=torch.float64), num_tokens, 16) + 2.0**-20
    seen = truth > 1e-30  # smaller masses underflow in float32
    off = (mass.double()[seen].log() - truth[seen].log()).abs().max()
    assert float(off) <= 2.0 * float(allowed)
    merged = KernelArithmetic((), torch.float32, merged_tokens=16)
    q, k = torch.ones(1, 8), torch.ones(num_tokens, 1, 8)
    plain, wide = (kernel_radius(q, k, size / 8, 0.0, x) for x in (KernelArithmetic((), torch.float32), merged))
    assert bool((wide - plain >= float(allowed) - 2.0**-20).all())
