"""Small probability spaces, budgets and a gate run for the bridge."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product

import torch
from cells import Cell
from rational import (
    FiniteSpace,
    dot,
    exp_down,
    exp_up,
    grid_points,
    half_step,
    log_up,
    mean,
    nearest,
    proxy,
    residual_values,
    sqrt_up,
)

from witcert_core.meter.bounds import meter
from witcert_core.meter.bounds.joint import _tangents
from witcert_core.meter.budget import Budget
from witcert_core.policy.gates import Certified, GateState, block_risk

F = Fraction
Row = tuple[F, ...]


class DitherSpace:
    """Two tokens that share one row of two channels on a grid of ``2^n`` offsets: every outcome is counted."""

    def __init__(self, rng: random.Random) -> None:
        self.n = rng.randint(1, 3)
        self.keys = [[F(rng.randint(-40, 40), 16) for _ in range(2)] for _ in range(2)]
        self.scales = [[F(rng.randint(1, 8), 8) for _ in range(2)] for _ in range(2)]
        self.queries = [[F(rng.randint(-8, 8), 4) or F(1, 4) for _ in range(2)] for _ in range(2)]
        self.space = FiniteSpace(product(grid_points(self.n), repeat=2))
        self.delta = F(rng.randint(1, 9), 10)
        self.lam = F(rng.randint(-20, 20), 10)
        self.t = F(rng.randint(1, 12), 4)
        self.S = 2

    def prob(self, event: Callable[..., bool]) -> F:
        return self.space.prob(event)

    def residual(self, token: int, channel: int, u: F) -> F:
        x, s = self.keys[token][channel], self.scales[token][channel]
        return s * (nearest(x / s + u) - u) - x

    def err(self, token: int, row: Row, query: int = 0) -> F:
        """Logit error of a token for one of the queries."""
        return dot(self.queries[query], [self.residual(token, j, row[j]) for j in range(2)])

    def centred(self, row: Row) -> F:
        bias = [mean(residual_values(self.keys[0][j], self.scales[0][j], self.n)) for j in range(2)]
        return dot(self.queries[0], [self.residual(0, j, row[j]) - bias[j] for j in range(2)])

    def sigma_sq(self, token: int = 0) -> F:
        return sum((q * q * s * s for q, s in zip(self.queries[0], self.scales[token], strict=True)), F(0)) * proxy(
            self.n
        )

    def radius(self, token: int, ell: F) -> F:
        """The smaller of the deterministic radius and ``t + bias`` with ``t^2 >= 2 ell sigma^2``."""
        reach = dot([abs(q) for q in self.queries[0]], self.scales[token])
        return min(reach / 2, sqrt_up(2 * ell * self.sigma_sq(token)) + reach * half_step(self.n))

    @property
    def ell(self) -> F:
        return log_up(2 * self.S / self.delta)

    def violated(self, row: Row, query: int = 0) -> bool:
        return any(abs(self.err(t, row, query)) > self.radius(t, self.ell) for t in range(2))

    @property
    def events(self) -> list:  # type: ignore[type-arg]
        return [lambda row, t=t: abs(self.err(t, row)) > self.t / 4 for t in range(2)]

    def ids(self, row: Row) -> int:
        """A continuation that depends on the dither."""
        return int(self.err(0, row) > 0)

    def tv_above_meter(self, row: Row) -> bool:
        """The distance of these errors against the meter of the radii, weights one half."""
        a = [F(math.exp(-self.err(t, row))) for t in range(2)]
        r = [exp_up(self.radius(t, self.ell)) for t in range(2)]
        cell = Cell([F(1, 2), F(1, 2)], r, a)
        return cell.TV > (cell.R - 1) / (cell.R + 1)

    def mgf(self, values: Sequence[F]) -> F:
        """Mean of ``e^(lam x)``, rounded down."""
        return mean(exp_down(self.lam * x) for x in values)


class BudgetNumbers:
    """Budgets of a small model."""

    def __init__(self, rng: random.Random) -> None:
        self.layers, self.qo_heads, self.length = rng.randint(1, 4), rng.randint(1, 8), rng.randint(1, 30)
        self.delta_req = F(rng.choice((0.01, 0.001)))
        self.num_cells = self.layers * self.qo_heads * self.length
        self.declared = Budget(float(self.delta_req), self.layers, self.qo_heads, self.length)
        self.series = Budget(float(self.delta_req), self.layers, self.qo_heads)

    def declared_loc(self) -> F:
        return F(self.declared.delta_loc(1))

    def series_loc(self, t: int) -> F:
        return F(self.series.delta_loc(t))


class GateRun:
    """The implementation's gate on a cell whose blocks are single tokens."""

    def __init__(self, cell: Cell, tau: F) -> None:
        self.tau, self.blocks, self.rounds = tau, cell.S, 0
        gate = Certified(target="tv", tau=float(tau))
        repaired: list[int] = []
        self.accepted = False
        while True:
            now = cell.repaired(*repaired)
            value = meter(now.acc)[0].reshape(1)
            decision = gate.decide(self._state(now, value, repaired))
            if decision.action != "repair" or decision.block is None:
                self.accepted = decision.action == "accept"
                break
            repaired.append(decision.block)
            self.rounds += 1
        self.final = now

    def _state(self, cell: Cell, value: torch.Tensor, repaired: list[int]) -> GateState:
        p = torch.tensor([[float(x) for x in cell.w]], dtype=torch.float64)
        c = torch.tensor([[math.log(x) if x > 1 else 0.0 for x in cell.r]], dtype=torch.float64)
        done = torch.tensor([t in repaired for t in range(cell.S)])
        return GateState(
            meter=value,
            log_a=torch.zeros(1, dtype=torch.float64),
            out_rel=torch.zeros(1, dtype=torch.float64),
            first_meter=value,
            block_risk=block_risk(p, c, torch.arange(cell.S), cell.S),
            repaired=done,
            available=torch.ones(cell.S, dtype=torch.bool),
            block_bytes=1,
        )


class JointNumbers:
    """A dither law over a few tokens and the implementation's tangents to their errors."""

    def __init__(self, rng: random.Random) -> None:
        self.S = rng.randint(2, 4)
        self.theta = math.sqrt(2.0 * math.log(2.0 / 10 ** rng.uniform(-6, -0.5)))

        def numbers(low: float, high: float) -> torch.Tensor:
            return torch.tensor([rng.uniform(low, high) for _ in range(self.S)], dtype=torch.float64)

        self.sigma, self.bias = numbers(0.0, 0.5 * self.theta), numbers(0.0, 0.1)
        self.log_ka = torch.tensor(self.theta**2 + rng.uniform(0, 1), dtype=torch.float64)
        weight, sure = numbers(0.1, 1.0), torch.full((self.S,), 38.0, dtype=torch.float64)
        slope = self.sigma / (self.theta - self.sigma)
        half = 0.5 * self.log_ka
        self.radius, self.mu = _tangents(weight / weight.sum(), slope, self.bias, sure, float(half), half)
        self.deviations = [rng.uniform(0, 3 * self.theta) for _ in range(5)]

    def error(self, t: int, y: float) -> F:
        """``e^(b + sigma y)``, rounded down."""
        return exp_down(F(float(self.bias[t] + self.sigma[t] * y)))

    def tangent(self, t: int, y: float) -> F:
        """``g + mu x``, rounded up."""
        share = (self.theta - self.sigma[t]) * y - self.bias[t] - self.log_ka
        return exp_up(F(float(self.radius[t]))) + F(float(self.mu)) * exp_up(F(float(share)))
