"""Keys, queries and values of one small head, quantized by the implementation, read back exactly."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property

import torch
from cells import Cell
from rational import TINY, dot, norm_sq, sqrt_up, sub, tilted, tv
from torch import Tensor

from witcert_core.cache.bands import BandMap, band_map
from witcert_core.cache.norm_codes import decode_norm, value_codes, witness_codes
from witcert_core.cache.radii import radius_dither, radius_witness
from witcert_core.meter import directional
from witcert_core.meter.kernel_error import KernelArithmetic, mass_error, output_error
from witcert_core.meter.output import output_bound
from witcert_core.meter.sums import AccField, accumulate
from witcert_core.meter.tv import softmax_with_sink
from witcert_core.quantizers.dither import DitherKey, dither_vectors, group_scales, quantize_int8
from witcert_core.quantizers.rotary import RotarySpec

F = Fraction
D = 8
GROUP = 4
SPLIT = 12
"""Weights of a split of the cache may be ``2^-12`` times the heaviest of the row."""
Rows = list[list[F]]


def exact(x: Tensor) -> list[F]:
    """Elements as rationals."""
    return [F(float(v)) for v in x.reshape(-1)]


class Head:
    """``S`` tokens of one KV head and one query, ``D = 8``, groups of 4 channels."""

    def __init__(self, rng: random.Random) -> None:
        gen = torch.Generator().manual_seed(rng.randrange(2**31))
        self.S = rng.randint(2, 4)
        self.spec = RotarySpec(D, interleaved=rng.random() < 0.5)
        self.map: BandMap = band_map(self.spec, 2)
        self.keys = torch.randn(self.S, 1, D, generator=gen) * rng.choice((0.5, 2.0))
        self.query = torch.randn(1, D, generator=gen)
        self.offsets = dither_vectors(DitherKey(rng.randrange(2**20), 7), torch.arange(1, self.S + 1), 3, [5], D)
        coarse = self.keys + 0.03 * torch.randn(self.keys.shape, generator=gen)
        self.stored = coarse
        self.again = coarse.to(torch.bfloat16).to(torch.float32)
        self.scale = F(rng.choice((1, 3)), 8)
        self.vals = torch.randn(self.S, 1, 3, generator=gen)
        self.vals_stored = self.vals + 0.02 * torch.randn(self.vals.shape, generator=gen)
        self.m = F(rng.randint(5, 15), 10)
        self.codes, self.scales = quantize_int8(self.keys, self.offsets, GROUP)

    # --- token 0 and the query, exactly

    @cached_property
    def q(self) -> list[F]:
        return exact(self.query)

    @cached_property
    def q_tilde(self) -> list[F]:
        return exact(self.query.to(torch.bfloat16))

    @cached_property
    def k(self) -> list[F]:
        return exact(self.keys[0])

    @cached_property
    def k_tilde(self) -> list[F]:
        return exact(self.stored[0])

    @cached_property
    def k_again(self) -> list[F]:
        return exact(self.again[0])

    @cached_property
    def d(self) -> list[F]:
        return sub(self.k_tilde, self.k)

    @property
    def bands(self) -> range:
        return range(self.map.num_bands)

    def band(self, x: Sequence[F], b: int) -> list[F]:
        return [v for v, where in zip(x, self.map.channel_band.tolist(), strict=True) if where == b]

    @cached_property
    def q_norms(self) -> list[F]:
        return [sqrt_up(norm_sq(self.band(self.q, b))) for b in self.bands]

    def witness(self, x: Sequence[F]) -> list[F]:
        """The implementation's stored band norms of a residual, decoded."""
        residual = torch.tensor([float(v) for v in x], dtype=torch.float64)
        return exact(decode_norm(witness_codes(torch.zeros(D, dtype=torch.float64), residual, self.map)))

    def value_witness(self, x: Sequence[F]) -> F:
        residual = torch.tensor([float(v) for v in x], dtype=torch.float64)
        return F(float(decode_norm(value_codes(torch.zeros_like(residual), residual))))

    def rotated(self, x: Sequence[F]) -> list[F]:
        """Every rotary pair turned by the angle with cosine 3/5 and sine 4/5, with the engine's pairing."""
        out = list(x)
        for i, j in self.spec.pair_channels().tolist():
            out[i], out[j] = F(3, 5) * x[i] - F(4, 5) * x[j], F(4, 5) * x[i] + F(3, 5) * x[j]
        return out

    def scaled(self, x: Sequence[F]) -> list[F]:
        return [self.m * v for v in x]

    # --- logits and radii of all tokens

    @cached_property
    def z(self) -> list[F]:
        return [self.scale * dot(self.q, exact(x)) for x in self.keys]

    @cached_property
    def z_tilde(self) -> list[F]:
        return [self.scale * dot(self.q, exact(x)) for x in self.stored]

    @cached_property
    def z_again(self) -> list[F]:
        return [self.scale * dot(self.q, exact(x)) for x in self.again]

    @cached_property
    def c(self) -> list[F]:
        """The implementation's deterministic radii."""
        codes = witness_codes(self.keys, self.stored, self.map)
        return exact(radius_witness(self.query, codes, self.map, float(self.scale)))

    @property
    def code_radius_witness(self) -> F:
        return self.c[0]

    def softmax(self, z: Sequence[F]) -> list[F]:
        """The implementation's softmax."""
        return exact(softmax_with_sink(torch.tensor([[float(v) for v in z]], dtype=torch.float64)))

    @staticmethod
    def softcap(z: F) -> F:
        return F(5 * math.tanh(float(z) / 5))

    @staticmethod
    def clip(z: F) -> F:
        return min(F(1), max(F(-1), z))

    @cached_property
    def cell(self) -> Cell:
        """The cell of these logits; errors and radii exponentiated with their own rounding outward."""
        growth = [F(math.exp(x)) * (1 + F(1, 2**40)) for x in self.c]
        a = [F(math.exp(x - y)) for x, y in zip(self.z, self.z_tilde, strict=True)]
        return Cell(self.softmax(self.z_tilde), growth, a)

    # --- sinks

    def _eta(self, logits: Sequence[F], c: Sequence[F], sink: Tensor | None) -> F:
        row = torch.tensor([[float(v) for v in logits]], dtype=torch.float64)
        radius = torch.tensor([[float(v) for v in c]], dtype=torch.float64)
        return F(float(accumulate(row, radius, sink_logits=sink)[0, AccField.ETA]))

    @property
    def eta_with_sink(self) -> F:
        return self._eta(self.z_tilde, self.c, torch.tensor([0.5], dtype=torch.float64))

    @property
    def eta_with_free_token(self) -> F:
        return self._eta([*self.z_tilde, F(1, 2)], [*self.c, F(0)], None)

    # --- values and outputs

    @cached_property
    def values(self) -> Rows:
        return [exact(x) for x in self.vals_stored]

    @cached_property
    def exact_values(self) -> Rows:
        return [exact(x) for x in self.vals]

    @cached_property
    def rho(self) -> list[F]:
        """The implementation's value radii."""
        return exact(decode_norm(value_codes(self.vals, self.vals_stored)))

    @cached_property
    def diam(self) -> F:
        return max(sqrt_up(norm_sq(sub(x, y))) for x in self.values for y in self.values)

    def average(self, w: Sequence[F], rows_: Rows) -> list[F]:
        return [sum((x * v[j] for x, v in zip(w, rows_, strict=True)), F(0)) for j in range(3)]

    @cached_property
    def output_error(self) -> list[F]:
        return sub(self.average(self.cell.p, self.exact_values), self.average(self.cell.w, self.values))

    @cached_property
    def mean_shift(self) -> list[F]:
        return sub(self.average(self.cell.p, self.values), self.average(self.cell.w, self.values))

    @cached_property
    def cov_v(self) -> F:
        own = self.average(self.cell.w, self.values)
        return self.cell.mean([norm_sq(v) for v in self.values]) - norm_sq(own)

    @cached_property
    def cov_rho(self) -> F:
        return self.cell.mean([x * x for x in self.rho]) - self.cell.mean(self.rho) ** 2

    @cached_property
    def _acc(self) -> Tensor:
        logits = torch.tensor([[float(v) for v in self.z_tilde]], dtype=torch.float64)
        radius = torch.tensor([[math.log(x) for x in self.cell.r]], dtype=torch.float64)
        rho = torch.tensor([[float(x)] for x in self.rho], dtype=torch.float64)
        return accumulate(logits, radius, self.vals_stored.to(torch.float64), rho)

    @property
    def v_radius(self) -> F:
        return F(float(self._acc[0, AccField.V_RADIUS]))

    @cached_property
    def code_output(self) -> F:
        own = torch.tensor([math.sqrt(norm_sq(self.average(self.cell.w, self.values)))], dtype=torch.float64)
        moved = torch.tensor([float(self.cell.TV * (1 + TINY))], dtype=torch.float64)
        bound = output_bound(self._acc, moved, own)
        return F(float(bound[0]))

    @property
    def directional_moved(self) -> F:
        """The implementation's bound that knows directions."""
        weights = torch.tensor([[float(x) for x in self.cell.w]], dtype=torch.float64)
        radius = torch.tensor([[math.log(x) for x in self.cell.r]], dtype=torch.float64)
        rho = torch.tensor([[float(x)] for x in self.rho], dtype=torch.float64)
        own = torch.tensor([[float(x) for x in self.average(self.cell.w, self.values)]], dtype=torch.float64)
        return F(min(1e9, float(directional.moved(weights, radius, self.vals_stored.to(torch.float64), rho, own))))

    @property
    def unit_vectors(self) -> Rows:
        rows_ = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (3, 4, 0), (0, -4, 3), (2, 2, 1), (1, -2, 2), (2, 3, 6), (-6, 2, 3))
        return [[F(x) / sqrt_up(norm_sq([F(y) for y in row])) for x in row] for row in rows_]

    def quadratic(self, u: Sequence[F]) -> F:
        """``sum <u, v~>^2``."""
        return sum((dot(u, v) ** 2 for v in self.values), F(0))

    @property
    def spectral_bound(self) -> F:
        """The implementation's bound on the largest eigenvalue of ``sum v~ v~^T``."""
        x = self.vals_stored[:, 0].to(torch.float64)
        return F(float(directional.spectral(x.T @ x)))

    @property
    def exact_output(self) -> list[F]:
        return self.average(self.cell.p, self.exact_values)

    def distances(self, centre: Sequence[F]) -> list[F]:
        """``||v~ - centre||`` of each token, rounded up."""
        return [sqrt_up(norm_sq(sub(v, centre))) for v in self.values]

    @cached_property
    def centre(self) -> list[F]:
        """Some centre that is not the output."""
        return exact(self.vals_stored.mean(0))

    # --- weights as a 16-bit kernel multiplies them: cast, and divided by the sum of the uncast ones

    def _cast(self, dtype: torch.dtype, scale: F) -> list[F]:
        top = max(self.cell.w)
        weights = torch.tensor([float(w / top * scale) for w in self.cell.w], dtype=torch.float64)
        return [x * top / scale for x in exact(weights.to(dtype))]

    @staticmethod
    def share(weights: Sequence[F]) -> list[F]:
        return [x / sum(weights, F(0)) for x in weights]

    @cached_property
    def served_relative(self) -> list[F]:
        """Cast to bfloat16: off in relative terms only."""
        return self._cast(torch.bfloat16, F(1))

    @property
    def cast_errors(self) -> list[F]:
        return [s / w - 1 for s, w in zip(self.served_relative, self.cell.w, strict=True)]

    @property
    def arithmetic(self) -> KernelArithmetic:
        """What covers both casts, and the rounding of an output to bfloat16."""
        return KernelArithmetic((torch.bfloat16, torch.float16), torch.bfloat16)

    @property
    def cast_unit(self) -> F:
        return F(self.arithmetic.cast_unit)

    @property
    def output_least(self) -> F:
        return F(self.arithmetic.output_least)

    @cached_property
    def served(self) -> list[F]:
        """Cast to float16 in a split whose weights are small, so that some are subnormal."""
        return self._cast(torch.float16, F(1, 2**SPLIT))

    @property
    def cast_least(self) -> list[F]:
        return [max(self.cell.w) * F(2**SPLIT, 2**25)] * self.S

    @property
    def lost(self) -> F:
        return self.cast_unit + sum(self.cast_least, F(0))

    @property
    def code_mass_error(self) -> F:
        """The implementation's, which counts on the heaviest of the weights before the division to be 1."""
        return F(float(mass_error(self.S * 2**SPLIT, self.arithmetic)))

    @staticmethod
    def rounded(x: Sequence[F]) -> list[F]:
        """Channels rounded to bfloat16."""
        return exact(torch.tensor([float(v) for v in x], dtype=torch.float64).to(torch.bfloat16))

    @cached_property
    def code_kernel_error(self) -> F:
        """The implementation's bound between what is handed on and the mean with the weights computed again."""

        def up(x: F) -> torch.Tensor:
            return torch.tensor(float(x * (1 + TINY)), dtype=torch.float64)

        lengths = self.distances([F(0)] * 3)
        bound = output_error(
            up(tv(self.share(self.served), self.cell.w)),
            num_tokens=self.S * 2**SPLIT,
            norm=up(sqrt_up(norm_sq(self.average(self.cell.w, self.values)))),
            mean_norm=up(self.cell.mean(lengths)),
            max_norm=up(max(lengths)),
            diameter=up(self.diam),
            v_dim=3,
            arithmetic=self.arithmetic,
        )
        return F(float(bound))

    @cached_property
    def w2(self) -> list[F]:
        return tilted(self.cell.w, [1 + F(t + 1, 100) for t in range(self.S)])

    # --- the dithered INT8 cache, exactly

    @cached_property
    def steps(self) -> list[F]:
        """One scale per group of token 0."""
        return exact(self.scales[0])

    @property
    def groups(self) -> range:
        return range(D // GROUP)

    def group(self, x: Sequence[F], j: int) -> list[F]:
        return list(x[j * GROUP : (j + 1) * GROUP])

    @cached_property
    def residual(self) -> list[F]:
        """``s (code - u) - x`` of token 0."""
        u, codes = exact(self.offsets[0]), exact(self.codes[0])
        return [self.steps[i // GROUP] * (codes[i] - u[i]) - self.k[i] for i in range(D)]

    @property
    def step_ok(self) -> bool:
        return bool((group_scales(self.keys, GROUP) == self.scales).all())

    @cached_property
    def code_offsets(self) -> set[F]:
        return set(exact(self.offsets))

    def code_row(self, pass_id: int) -> list[F]:
        return exact(dither_vectors(DitherKey(1, 2), torch.tensor([pass_id]), 0, [0], 16))

    def dither_formula(self, tail_up: F) -> F:
        """``min(sum s|q|/2, tail sigma + sum |q| s 2^-9)`` of token 0, ``tail`` the root of ``2 ln(2S/delta)``."""
        q, s = [abs(self.scale * x) for x in self.q], [self.steps[i // GROUP] for i in range(D)]
        sigma = sqrt_up(sum((x * x * y * y for x, y in zip(q, s, strict=True)), F(0)) * (1 - F(1, 4**8)) / 12)
        return min(dot(q, s) / 2, tail_up * sigma + dot(q, s) / 2**9)

    def code_radius_dither(self, delta: F) -> F:
        radius = radius_dither(self.query, self.scales, float(self.scale), float(delta), self.S, GROUP)
        return F(float(radius[0, 0]))


__all__ = ["Head", "exact", "tv"]
