"""A cell in exact arithmetic, next to what the implementation computes from the same weights and radii."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import torch
from rational import TINY, sqrt_up, subsets, tilted, tv

from witcert_core.meter.bounds import FORMS, extremal, jensen, meter, needle
from witcert_core.meter.bounds.shared import read
from witcert_core.meter.sums import AccField, accumulate_weights

F = Fraction


class Cell:
    """Weights ``w``, ratios ``r = e^c`` and ``a = e^-eps``; names as in ``WitCert/Attention/Cell.lean``."""

    def __init__(self, w: Sequence[F], r: Sequence[F], a: Sequence[F]) -> None:
        total = sum(w, F(0))
        self.w = [x / total for x in w]
        self.r, self.a = list(r), list(a)
        self.S = len(self.w)

    def mean(self, f: Sequence[F]) -> F:
        return sum((x * y for x, y in zip(self.w, f, strict=True)), F(0))

    @cached_property
    def A(self) -> F:
        return self.mean(self.r)

    @cached_property
    def eta(self) -> F:
        return self.mean([x - 1 for x in self.r])

    @cached_property
    def Q(self) -> F:
        return self.mean([(x - 1) ** 2 for x in self.r])

    @cached_property
    def R(self) -> F:
        return max(self.r)

    @cached_property
    def Z(self) -> F:
        return self.mean(self.a)

    @cached_property
    def p(self) -> list[F]:
        return tilted(self.w, self.a)

    @cached_property
    def TV(self) -> F:
        return tv(self.p, self.w)

    @cached_property
    def rms_sq(self) -> F:
        return self.A**2 * self.Q

    @cached_property
    def spread_sq(self) -> F:
        """Bound on the second moment of ``a/Z - 1``."""
        return self.rms_sq if self.Q >= 1 else min(self.rms_sq, self.Q / (1 - self.Q))

    # --- the implementation on the same numbers

    @cached_property
    def acc(self) -> torch.Tensor:
        """The implementation's accumulators for these weights and radii."""
        c = [math.log(x) if x > 1 else 0.0 for x in self.r]
        weights = torch.tensor([float(x) for x in self.w], dtype=torch.float64)
        return accumulate_weights(weights, torch.tensor(c, dtype=torch.float64))

    def field(self, name: str) -> F:
        """One of the implementation's accumulators."""
        return F(float(self.acc[AccField[name]]))

    def code(self, form: str) -> F:
        """The implementation's bound."""
        if form == "meter":
            return F(float(meter(self.acc)[0]))
        if form == "extremal":
            c = torch.tensor([math.log(x) if x > 1 else 0.0 for x in self.r], dtype=torch.float64)
            return F(float(extremal.bound(torch.tensor([float(x) for x in self.w], dtype=torch.float64), c)))
        return F(float(FORMS[form](self.acc)))

    # --- sets and attacks

    def mass(self, s: Sequence[F | int]) -> F:
        return self.mean([F(x) for x in s])

    def up(self, s: Sequence[F | int]) -> F:
        return self.mean([x * r for x, r in zip(s, self.r, strict=True)])

    def lo(self, s: Sequence[F | int]) -> F:
        return self.mean([(1 - x) / r for x, r in zip(s, self.r, strict=True)])

    def z_of(self, s: Sequence[F | int]) -> F:
        return self.up(s) + self.lo(s)

    def attack_value(self, s: Sequence[F | int]) -> F:
        return self.up(s) / self.z_of(s) - self.mass(s)

    def upper(self, theta: F, tau: F) -> list[F]:
        """Threshold set."""
        return [F(1) if r > theta else tau if r == theta else F(0) for r in self.r]

    def threshold(self, target: F) -> list[F]:
        """The threshold set with that ``Z``."""
        for theta in sorted(set(self.r), reverse=True):
            low, high = self.z_of(self.upper(theta, F(0))), self.z_of(self.upper(theta, F(1)))
            if low <= target <= high:
                return self.upper(theta, (target - low) / (high - low) if high > low else F(0))
        raise AssertionError("no threshold set reaches the target")

    def best_tau(self, theta: F) -> F:
        """The clipped stationary share of the tokens at a radius."""
        none, full = self.upper(theta, F(0)), self.upper(theta, F(1))
        a, y, m = self.up(none), self.lo(none), self.mass(full) - self.mass(none)
        slope = m * (theta - 1 / theta)
        if slope == 0:
            return F(0)
        return min(F(1), max(F(0), (sqrt_up(theta * y + a / theta) - a - y) / slope))

    @cached_property
    def subsets(self) -> list[tuple[int, ...]]:
        return subsets(self.S)

    # --- jensen

    def jensen_n(self, m: F, u: F) -> F:
        return m * self.eta + (1 - 2 * m) * u + u * (self.eta - u)

    def jensen_value(self, m: F | int, u: F | int) -> F:
        n = self.jensen_n(F(m), F(u))
        return (1 - m) * n / (n + 1 - m)

    def set_point(self, s: Sequence[int]) -> tuple[F, F]:
        m = self.mass(s)
        return m, self.up(s) - m

    @cached_property
    def light_sets(self) -> list[tuple[F, F]]:
        """``(m, u)`` of the sets of mass at most one half."""
        return [point for point in map(self.set_point, self.subsets) if 2 * point[0] <= 1]

    @cached_property
    def light_side(self) -> tuple[F, F]:
        """``(m, u)`` of the raised set or of its complement, whichever is lighter."""
        raised = [int(x >= self.Z) for x in self.a]
        return min(self.set_point(raised), self.set_point([1 - x for x in raised]))

    def _peak(self, low: F, high: F, cap: F) -> F:
        u = min(cap, (1 - 2 * low + self.eta) / 2)
        return high * self.eta + (1 - 2 * low) * u + u * (self.eta - u)

    def jensen_cells(self, count: int) -> F:
        """The bound on ``count`` uniform intervals."""
        best = F(0)
        for j in range(count):
            low, high = F(j, 2 * count), F(j + 1, 2 * count)
            spread = sqrt_up(high * (1 - high) * (self.Q - self.eta**2))
            n = self._peak(low, high, min(self.eta, high * (self.R - 1), high * self.eta + spread))
            best = max(best, (1 - low) * n / (n + 1 - low))
        return best

    # --- radii that are known up to something to spare

    @property
    def spare(self) -> F:
        return F(1, 5) * self.eta

    def _known(self, tokens: Sequence[int]) -> SparedCell:
        """Radii of these tokens below the true ones, by ``spare`` in all."""
        share = {t: self.spare / (len(tokens) * self.w[t]) for t in tokens}
        radii = [max(F(1), r - share[t]) if t in share else r for t, r in enumerate(self.r)]
        return SparedCell(self.w, radii, self.a, self.spare)

    @cached_property
    def spared_all(self) -> SparedCell:
        return self._known(range(self.S))

    @cached_property
    def spared_rest(self) -> SparedCell:
        """The heaviest token's radius is true."""
        return self._known(self.rest)

    # --- needle

    @cached_property
    def h(self) -> int:
        return max(range(self.S), key=lambda t: self.w[t])

    @cached_property
    def w_h(self) -> F:
        return self.w[self.h]

    @cached_property
    def r_h(self) -> F:
        return self.r[self.h]

    @cached_property
    def rest(self) -> list[int]:
        return [t for t in range(self.S) if t != self.h]

    @cached_property
    def A_r(self) -> F:
        return sum((self.w[t] * self.r[t] for t in self.rest), F(0))

    @cached_property
    def h_raised(self) -> bool:
        return self.a[self.h] >= self.Z

    @cached_property
    def rest_sets(self) -> list[tuple[F, F]]:
        """``(m, u)`` of the sets without the heaviest token."""
        return [self.set_point(s) for s in self.subsets if s[self.h] == 0]

    def spared_point(self, m: F, u: F) -> bool:
        b, e = 1 - self.w_h - m, self.A_r - (1 - self.w_h) - u
        v = b * b / (b + e) if b + e else F(0)
        return (self.TV + m) * (m + u + self.w_h / self.r_h + v) <= m + u

    def attacked_point(self, m: F, u: F) -> bool:
        n = self.jensen_n(m, u)
        return self.TV * (n + m) <= m * n

    def spared(self, low: F, high: F, t: F) -> F:
        """``N(t)/D(t)`` of the interval."""
        mu = 1 - self.w_h
        b, eta_r, kept = mu - low, self.A_r - mu, self.w_h / self.r_h
        numerator = ((1 - low) * (b + eta_r) + high * (self.w_h - kept + b)) * t - (1 - low) * t * t - high * b * b
        return numerator / ((kept + mu + eta_r) * t - t * t + b * b)

    def interval(self, j: int, count: int) -> tuple[F, F]:
        return (1 - self.w_h) * F(j, count), (1 - self.w_h) * F(j + 1, count)

    def spared_range(self, low: F, high: F) -> tuple[F, F]:
        """Range of ``t = b + e`` given the interval's cap on ``u``."""
        mu = 1 - self.w_h
        eta_r = self.A_r - mu
        q_r = sum((self.w[t] * (self.r[t] - 1) ** 2 for t in self.rest), F(0))
        r_max = max((self.r[t] for t in self.rest), default=F(1))
        spread = sqrt_up(max(F(0), high * (mu - high) * (mu * q_r - eta_r**2))) / mu
        cap = min(eta_r, high * (r_max - 1), high * eta_r / mu + spread)
        return mu - low + eta_r - cap, mu - low + eta_r

    def _spared_slope(self, low: F, high: F) -> tuple[F, F, F, F]:
        """``L, M, C`` of the slope ``L t^2 - 2 M t + C``, and ``b``."""
        mu = 1 - self.w_h
        b, eta_r, kept = mu - low, self.A_r - mu, self.w_h / self.r_h
        p, r = (1 - low) * (b + eta_r) + high * (self.w_h - kept + b), kept + mu + eta_r
        return p - (1 - low) * r, (1 - low + high) * b * b, (p + high * r) * b * b, b

    def _spared_root(self, low: F, high: F) -> F:
        lead, middle, tail, _ = self._spared_slope(low, high)
        return tail / (middle + sqrt_up(max(F(0), middle**2 - lead * tail)))

    def slope_at_root(self, low: F, high: F) -> F:
        """Size of the slope at the code's root, 0 where it has none."""
        lead, middle, tail, _ = self._spared_slope(low, high)
        t = self._spared_root(low, high)
        return F(0) if middle**2 < lead * tail else abs(lead * t * t - 2 * middle * t + tail)

    def spared_candidates(self, low: F, high: F) -> list[F]:
        """Both ends and the clipped first root."""
        first, last = self.spared_range(low, high)
        t = min(max(self._spared_root(low, high), first), last)
        return [self.spared(low, high, x) for x in (first, last, t)]

    def needle_intervals(self, count: int) -> F:
        """The refined bound on ``count`` uniform intervals."""
        best = F(0)
        for j in range(count):
            low, high = self.interval(j, count)
            first, last = self.spared_range(low, high)
            n = self._peak(low, high, last - first)
            best = max(best, high * n / (high + n), *self.spared_candidates(low, high))
        return best * (1 + TINY)

    # --- repair, blocks, tokens that neither side sees

    @cached_property
    def padded(self) -> Cell:
        """The cell and a token of weight 0 with a large radius."""
        return Cell([*self.w, F(0)], [*self.r, F(1000)], [*self.a, F(1, 7)])

    def repaired(self, *tokens: int) -> Cell:
        """Exact keys back for some tokens."""
        w = [self.w[t] * (self.a[t] if t in tokens else 1) for t in range(self.S)]
        one = [F(1) if t in tokens else None for t in range(self.S)]
        return Cell(
            w, [o or r for o, r in zip(one, self.r, strict=True)], [o or a for o, a in zip(one, self.a, strict=True)]
        )

    @property
    def blocked_A(self) -> F:
        return sum(self.r, F(0)) / self.S


class SparedCell(Cell):
    """Known radii: over any set of tokens, ``sum w (e^c - 1)`` of the true ones is larger by at most ``spare``."""

    def __init__(self, w: Sequence[F], r: Sequence[F], a: Sequence[F], spare: F) -> None:
        super().__init__(w, r, a)
        self.over = spare
        self.known_eta = self.mean([x - 1 for x in self.r])

    @cached_property
    def eta(self) -> F:
        return self.known_eta + self.over

    @cached_property
    def A_r(self) -> F:
        return sum((self.w[t] * self.r[t] for t in self.rest), F(0)) + self.over

    def jensen_cells(self, count: int) -> F:
        best = F(0)
        for j in range(count):
            low, high = F(j, 2 * count), F(j + 1, 2 * count)
            spread = sqrt_up(high * (1 - high) * (self.Q - self.known_eta**2))
            cap = min(self.known_eta, high * (self.R - 1), high * self.known_eta + spread) + self.over
            n = self._peak(low, high, cap)
            best = max(best, (1 - low) * n / (n + 1 - low))
        return best

    def spared_range(self, low: F, high: F) -> tuple[F, F]:
        mu = 1 - self.w_h
        known = self.A_r - self.over - mu
        q_r = sum((self.w[t] * (self.r[t] - 1) ** 2 for t in self.rest), F(0))
        r_max = max((self.r[t] for t in self.rest), default=F(1))
        spread = sqrt_up(max(F(0), high * (mu - high) * (mu * q_r - known**2))) / mu
        cap = min(known, high * (r_max - 1), high * known / mu + spread) + self.over
        return mu - low + known + self.over - cap, mu - low + known + self.over

    def code(self, form: str) -> F:
        fields = replace(read(self.acc), spare=torch.tensor(float(self.over * (1 + TINY)), dtype=torch.float64))
        return F(float({"jensen": jensen, "needle": needle}[form].bound_fields(fields))) * (1 + TINY)


def random_cell(rng: random.Random) -> Cell:
    """Two to five tokens; radii of one scale or another; errors anywhere within them, often at an end."""
    size = rng.randint(2, 5)
    peak = rng.choice((0.0, 0.0, 3.0, 6.0))
    weights = torch.softmax(
        torch.tensor([rng.gauss(0, 1) + (peak if t == 0 else 0) for t in range(size)], dtype=torch.float64), 0
    )
    w = [F(float(x)) for x in weights]
    if rng.random() < 0.1:
        w = [F(1, size)] * size
    scale = rng.choice((0.01, 0.1, 0.5, 2.0))
    r = [F(math.exp(scale * abs(rng.gauss(0, 1)) + 1e-3)) if rng.random() < 0.85 else F(1) for _ in range(size)]
    a = [rng.choice((x, 1 / x, 1 / x + (x - 1 / x) * F(rng.random()))) for x in r]
    return Cell(w, r, a)


_INSTANCE = re.compile(r"^def (\w+) : Cell Q Bool := cellOf (\[[^\]]*\]|\([^)]*\)) (.*)$", re.M)


def lean_instances(source: Path) -> dict[str, Cell]:
    """The explicit cells of ``Refuted.lean``, read from its text."""
    cells = {}
    for name, tokens, rest in _INSTANCE.findall(source.read_text()):
        values = [F(int(a), int(b)) if a else F(int(c)) for a, b, c in re.findall(r"\(q (\d+) (\d+)\)|\b(\d+)\b", rest)]
        w, w2, r, r2, a, a2 = values
        kinds = [t == "true" for t in re.findall(r"true|false", tokens)]
        cells[name] = Cell(
            [w if k else w2 for k in kinds], [r if k else r2 for k in kinds], [a if k else a2 for k in kinds]
        )
    return cells
