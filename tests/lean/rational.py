"""Exact rational arithmetic for the bridge: outward roots and exponentials, vectors, finite probability."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

Vector = Sequence[Fraction]

TINY = Fraction(1, 10**9)
_EXP_SLACK = Fraction(1, 10**12)


def sqrt_up(x: Fraction) -> Fraction:
    """A rational at or just above the root."""
    if x < 0:
        raise ValueError(f"root of {x}")
    shift = 1 << 160
    return Fraction(math.isqrt(x.numerator * shift * shift // x.denominator) + 1, shift) if x else Fraction(0)


def exp_up(x: Fraction) -> Fraction:
    """A rational above ``e^x``."""
    return Fraction(math.exp(x)) * (1 + _EXP_SLACK)


def exp_down(x: Fraction) -> Fraction:
    """A rational below ``e^x``."""
    return Fraction(math.exp(x)) * (1 - _EXP_SLACK)


def log_up(x: Fraction) -> Fraction:
    """A rational above ``ln x``."""
    return Fraction(math.log(x)) + _EXP_SLACK


def mean(values: Iterable[Fraction]) -> Fraction:
    """Arithmetic mean."""
    items = list(values)
    return sum(items, Fraction(0)) / len(items)


def dot(x: Vector, y: Vector) -> Fraction:
    """Inner product."""
    return sum((a * b for a, b in zip(x, y, strict=True)), Fraction(0))


def sub(x: Vector, y: Vector) -> list[Fraction]:
    """Difference."""
    return [a - b for a, b in zip(x, y, strict=True)]


def norm_sq(x: Vector) -> Fraction:
    """Squared Euclidean norm."""
    return dot(x, x)


def tv(p: Vector, w: Vector) -> Fraction:
    """Total variation."""
    return sum((abs(a - b) for a, b in zip(p, w, strict=True)), Fraction(0)) / 2


def tilted(w: Vector, a: Vector) -> list[Fraction]:
    """``w a`` normalised."""
    total = dot(w, a)
    return [x * y / total for x, y in zip(w, a, strict=True)]


def close(x: Vector, y: Vector) -> bool:
    """Equal within a billionth."""
    return all(abs(a - b) <= TINY for a, b in zip(x, y, strict=True))


def subsets(size: int) -> list[tuple[int, ...]]:
    """All 0/1 vectors."""
    return list(product((0, 1), repeat=size))


def grid_points(n: int) -> list[Fraction]:
    """``(j + 1/2)/2^n - 1/2``."""
    return [Fraction(2 * j + 1, 2 ** (n + 1)) - Fraction(1, 2) for j in range(2**n)]


def half_step(n: int) -> Fraction:
    """``1/2^(n+1)``."""
    return Fraction(1, 2 ** (n + 1))


def sign_sums(n: int) -> list[Fraction]:
    """All sums of ``n`` signs of sizes ``h, 2h, 4h, ...`` with ``h`` the half step."""
    sizes = [half_step(n) * 2**i for i in range(n)]
    return [dot(sizes, signs) for signs in product((Fraction(-1), Fraction(1)), repeat=n)]


def proxy(n: int) -> Fraction:
    """``(1 - 4^-n)/12``."""
    return (1 - Fraction(1, 4**n)) / 12


def nearest(x: Fraction) -> int:
    """Nearest integer, ties to even, as ``torch.round``."""
    return round(x)


def residual_values(x: Fraction, step: Fraction, n: int) -> list[Fraction]:
    """``s (round(x/s + u) - u) - x`` over the grid."""
    return [step * (nearest(x / step + u) - u) - x for u in grid_points(n)]


def is_shifted_grid(values: Iterable[Fraction], step: Fraction, n: int) -> bool:
    """``step (o - u)`` over the grid for one ``o`` with ``|o|`` at most the half step."""
    found = sorted(values)
    offset = mean(found) / step
    wanted = sorted(step * (offset - u) for u in grid_points(n))
    return found == wanted and abs(offset) <= half_step(n)


class FiniteSpace:
    """Equally likely outcomes."""

    def __init__(self, outcomes: Iterable[Any]) -> None:
        self.outcomes = list(outcomes)

    def prob(self, event: Callable[[Any], bool]) -> Fraction:
        """Probability by counting."""
        return Fraction(sum(1 for o in self.outcomes if event(o)), len(self.outcomes))

    def mean(self, value: Callable[[Any], Fraction]) -> Fraction:
        """Expectation by counting."""
        return mean(value(o) for o in self.outcomes)
