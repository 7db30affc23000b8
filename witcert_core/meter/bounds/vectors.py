"""Checking every bound against a file of cells whose exact supremum is known.

The file is a JSON object ``{"note": ..., "cases": [...]}``; each case has ``p_compressed`` and ``radius``
(lists of one length) and ``sup_tv``, the supremum of TV over ``|eps| <= radius``. Other keys are ignored.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from witcert_core.errors import VectorFileError
from witcert_core.meter.bounds import FORM_NAMES, FORMS, extremal, meter
from witcert_core.meter.sums import accumulate_weights

SUM_TOLERANCE = 1e-9
"""How far from 1 the weights of a case may sum; they are normalised within it."""


@dataclass(frozen=True)
class VectorCase:
    """One cell: weights, radii and the supremum of TV."""

    p: tuple[float, ...]
    c: tuple[float, ...]
    sup_tv: float


@dataclass(frozen=True)
class FormResult:
    """How one form did. ``values`` are clipped to 1 and aligned with the cases.

    Args:
        violations: indices of cases where the form is below the supremum.
        vacuous: cases where it says 1 and the supremum does not.
        ratios: value / supremum where the supremum is positive, ascending.
        at_zero: largest value where the supremum is 0, ``None`` without such a case.
    """

    name: str
    values: tuple[float, ...]
    violations: tuple[int, ...]
    vacuous: int
    ratios: tuple[float, ...]
    at_zero: float | None

    def quantile(self, share: float) -> float:
        """Smallest ratio that at least ``share`` of the ratios do not exceed; NaN without any."""
        if not self.ratios:
            return math.nan
        return self.ratios[max(0, math.ceil(share * len(self.ratios)) - 1)]


def load_vectors(path: Path) -> list[VectorCase]:
    """Cases of a file; ``VectorFileError`` names the file, the case, the value and what is allowed."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise VectorFileError(f"{path}: cannot be read: {reason}") from error
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, or a number of thousands of digits
        raise VectorFileError(f"{path}: not JSON that can be read: {error}") from error
    cases = document.get("cases") if isinstance(document, dict) else None
    if not isinstance(cases, list) or not cases:
        raise VectorFileError(f'{path}: needs a JSON object with a non-empty list under "cases"')
    return [_case(f"{path}: cases[{i}]", case) for i, case in enumerate(cases)]


def _case(where: str, case: Any) -> VectorCase:
    if not isinstance(case, dict):
        raise VectorFileError(f"{where}: is {type(case).__name__}; it must be an object")
    p = _numbers(where, case, "p_compressed")
    c = _numbers(where, case, "radius")
    if len(p) != len(c):
        raise VectorFileError(f"{where}: {len(p)} weights and {len(c)} radii; they must be as many")
    total = math.fsum(p)
    if abs(total - 1.0) > SUM_TOLERANCE:
        raise VectorFileError(f"{where}.p_compressed: sums to {total!r}; it must sum to 1")
    sup = case.get("sup_tv")
    if not isinstance(sup, int | float) or isinstance(sup, bool) or not 0.0 <= sup <= 1.0:
        raise VectorFileError(f"{where}.sup_tv: is {sup!r}; it must be a number from 0 to 1")
    return VectorCase(tuple(x / total for x in p), c, float(sup))


def _numbers(where: str, case: dict[str, Any], key: str) -> tuple[float, ...]:
    values = case.get(key)
    if not isinstance(values, list) or not values:
        raise VectorFileError(f"{where}.{key}: is {values!r}; it must be a non-empty list of numbers")
    for i, x in enumerate(values):
        if not isinstance(x, int | float) or isinstance(x, bool) or not 0.0 <= x <= sys.float_info.max:
            raise VectorFileError(f"{where}.{key}[{i}]: is {x!r}; it must be a finite number, not negative")
    return tuple(float(x) for x in values)


def check_vectors(cases: Sequence[VectorCase]) -> list[FormResult]:
    """Evaluate the six forms and the meter on every case, without any tolerance."""
    names = (*FORM_NAMES, "meter")
    table: dict[str, list[float]] = {name: [] for name in names}
    for case in cases:
        p = torch.tensor(case.p, dtype=torch.float64)
        c = torch.tensor(case.c, dtype=torch.float64)
        acc = accumulate_weights(p, c)
        for name, form in FORMS.items():
            table[name].append(form(acc).item())
        table["extremal"].append(extremal.bound(p, c).item())
        table["meter"].append(meter(acc)[0].item())
    return [_result(name, table[name], cases) for name in names]


def _result(name: str, raw: Sequence[float], cases: Sequence[VectorCase]) -> FormResult:
    values = tuple(min(1.0, x) for x in raw)
    pairs = list(zip(values, (case.sup_tv for case in cases), strict=True))
    zero = [value for value, sup in pairs if sup == 0.0]
    return FormResult(
        name=name,
        values=values,
        violations=tuple(i for i, (value, sup) in enumerate(pairs) if not value >= sup),
        vacuous=sum(value >= 1.0 and sup < 1.0 for value, sup in pairs),
        ratios=tuple(sorted(value / sup for value, sup in pairs if sup > 0.0)),
        at_zero=max(zero) if zero else None,
    )
