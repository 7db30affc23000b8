"""Conditions of a probe, true, false or undecided: what is not known is neither.

A row is metered for a probe unless its condition is known to be false before; a cell counts where it is known to be
true afterwards. An unknown cell that may meet it stays unknown.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from witcert_core.probes.fields import FIELDS, Value

Mask = bool | Tensor
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Decided:
    """Whether something may be true and may be false, for all at once or cell by cell (bool [H])."""

    may: Mask
    may_not: Mask

    @property
    def is_true(self) -> Mask:
        """Known to be true."""
        return self.may & _not(self.may_not)


UNDECIDED = Decided(True, True)


@dataclass(frozen=True)
class Always:
    """The condition of a probe without one."""

    def decide(self, _facts: Mapping[str, Value]) -> Decided:
        return Decided(True, False)


@dataclass(frozen=True)
class Compared:
    """`field operator value`; a word is compared by its place among the words of its field."""

    field: str
    operator: str
    value: str | int | float

    def decide(self, facts: Mapping[str, Value]) -> Decided:
        if self.field not in facts:
            return UNDECIDED
        found = facts[self.field]
        value = FIELDS[self.field].words.index(str(self.value)) if FIELDS[self.field].words else self.value
        holds = OPERATORS[self.operator](found, value)
        if not isinstance(found, Tensor):
            return Decided(bool(holds), not holds)
        missing = found.isnan() if found.is_floating_point() else torch.zeros_like(found, dtype=torch.bool)
        return Decided(holds | missing, ~holds | missing)


@dataclass(frozen=True)
class Prefixed:
    """`field startswith text`."""

    field: str
    text: str

    def decide(self, facts: Mapping[str, Value]) -> Decided:
        if self.field not in facts:
            return UNDECIDED
        holds = str(facts[self.field]).startswith(self.text)
        return Decided(holds, not holds)


@dataclass(frozen=True)
class Not:
    """`not condition`."""

    condition: Condition

    def decide(self, facts: Mapping[str, Value]) -> Decided:
        found = self.condition.decide(facts)
        return Decided(found.may_not, found.may)


@dataclass(frozen=True)
class All:
    """`condition and condition`."""

    conditions: tuple[Condition, ...]

    def decide(self, facts: Mapping[str, Value]) -> Decided:
        found = [condition.decide(facts) for condition in self.conditions]
        may, may_not = found[0].may, found[0].may_not
        for other in found[1:]:
            may, may_not = may & other.may, may_not | other.may_not
        return Decided(may, may_not)


@dataclass(frozen=True)
class Any_:
    """`condition or condition`."""

    conditions: tuple[Condition, ...]

    def decide(self, facts: Mapping[str, Value]) -> Decided:
        return Not(All(tuple(Not(condition) for condition in self.conditions))).decide(facts)


Condition = Always | Compared | Prefixed | Not | All | Any_


def _not(mask: Mask) -> Mask:
    return ~mask if isinstance(mask, Tensor) else not mask
