"""Every headline theorem's own statement, evaluated in exact arithmetic on the implementation's numbers.

The docstring above a theorem carries one ``python:`` expression of its statement and a ``Code:`` line that names
what relies on it. Here the text itself is evaluated, so that statement and implementation cannot drift apart.
"""

from __future__ import annotations

import importlib
import random
import re
from fractions import Fraction
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import rational
from cells import Cell, lean_instances, random_cell
from spaces import BudgetNumbers, DitherSpace, GateRun, JointNumbers
from vectors import Head

LEAN = Path(__file__).resolve().parents[2] / "lean"
CASES = 12
DOC = re.compile(r"/--(.*?)-/\s*(?:@\[[^\]]*\]\s*)?(?:theorem|instance) (\S+)", re.S)
NAMED = [n for line in (LEAN / "theorems.txt").read_text().splitlines() if (n := line.split("#")[0].strip())]


def docstrings() -> dict[str, str]:
    """Docstring of every theorem, by full name."""
    found = {}
    for path in sorted(LEAN.glob("WitCert/**/*.lean")):
        text = path.read_text()
        for match in DOC.finditer(text):
            doc = match.group(1).rsplit("/--", 1)[-1]
            spaces: list[str] = []
            for kind, name in re.findall(r"^(namespace|end)\b[ \t]*(\S*)", text[: match.start(2)], re.M):
                if kind == "namespace":
                    spaces.append(name)
                elif name and spaces and spaces[-1] == name:
                    spaces.pop()
            found[".".join([*spaces, match.group(2)])] = doc
    return found


DOCS = docstrings()


def expression(name: str) -> str:
    """The ``python:`` text of a theorem."""
    found = re.findall(r"`python: (.*?)`", DOCS[name], re.S)
    assert len(found) == 1, f"{name} has {len(found)} python: expressions; it must have one"
    return " ".join(found[0].split())


class Names:
    """What an expression may name: a cell, a head, a dither space, a budget, a gate run and exact arithmetic."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.head = Head(self.rng)
        self.cell: Cell = self.head.cell if seed % 3 == 0 else random_cell(self.rng)
        self.dither = DitherSpace(self.rng)
        self.budget = BudgetNumbers(self.rng)
        self.instances = lean_instances(LEAN / "WitCert/Examples/Refuted.lean")
        rng = self.rng
        self.own: dict[str, Any] = {
            "Fraction": Fraction,
            "tiny": rational.TINY,
            "cell": self.cell,
            "head": self.head,
            "dither": self.dither,
            "budget": self.budget,
            "n": rng.randint(1, 8),
            "y": Fraction(rng.randint(-200, 200), rng.randint(1, 97)),
            "step": Fraction(rng.randint(1, 50), 16),
            "lam": Fraction(rng.randint(-40, 40), 10),
            "bias": Fraction(rng.randint(-30, 30), 7),
            "kappa": Fraction(rng.randint(1, 30), 7),
            "tau": Fraction(rng.randint(1, 10), 10),
            "delta": Fraction(rng.randint(1, 99), 1000),
            "target": self.cell.z_of([0] * self.cell.S) * (1 - Fraction(seed % 7, 7))
            + self.cell.A * Fraction(seed % 7, 7),
            "shares": [Fraction(i, 8) for i in range(9)],
            "instance": self.instances.__getitem__,
            "fractional": [[Fraction(rng.randint(0, 8), 8) for _ in range(self.cell.S)] for _ in range(20)],
            "repaired": self.cell.repaired(*rng.sample(range(self.cell.S), rng.randint(1, self.cell.S))),
            "all_repaired": self.cell.repaired(*range(self.cell.S)),
            "gate": GateRun,
            "joint": JointNumbers(rng),
            "grown": [Fraction(rng.randint(1, 50), 7) for _ in range(self.cell.S)],
        }

    def scope(self, used: set[str]) -> dict[str, Any]:
        """Values of the names an expression uses; what is not found is an attribute or a builtin."""
        found = {}
        for name in used:
            owners = [self.own, vars(rational)]
            owner = next((o for o in owners if name in o), None)
            if owner is not None:
                found[name] = owner[name]
            elif (thing := next((o for o in (self.cell, self.head) if hasattr(o, name)), None)) is not None:
                found[name] = getattr(thing, name)
        return found


def names_in(code: CodeType) -> set[str]:
    """Global names used by a code object and the lambdas and comprehensions in it."""
    used = set(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            used |= names_in(inner)
    return used


def test_enough_theorems_are_listed() -> None:
    assert len(NAMED) == len(set(NAMED)) >= 60


@pytest.mark.parametrize("name", NAMED)
def test_statement_holds_on_the_implementations_numbers(name: str) -> None:
    text = expression(name)
    code = compile(text, name, "eval")
    for seed in range(CASES):
        assert eval(code, Names(seed).scope(names_in(code))) is True, f"{name} fails for case {seed}: {text}"


@pytest.mark.parametrize("name", NAMED)
def test_code_that_relies_on_it_exists(name: str) -> None:
    relied = re.findall(r"Code: (.*?)\n`python:", DOCS[name], re.S)
    assert len(relied) == 1, f"{name} needs one Code: line before its python: line"
    targets = re.findall(r"`((?:witcert_core|fractions)[\w.]*)`", relied[0])
    assert targets, f"{name} names no code"
    for target in targets:
        resolve(target)


def resolve(dotted: str) -> object:
    """Import the longest module prefix and read the rest as attributes."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(dotted)


def test_a_false_statement_would_fail() -> None:
    """The evaluation can fail: the bound without its outward direction is false somewhere."""
    code = compile("code('eform') <= TV", "false", "eval")
    assert eval(code, Names(1).scope(names_in(code))) is False
