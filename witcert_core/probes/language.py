"""From the text of a probe to what it asks; what cannot be asked is refused with its place in the text.

The grammar is grammar.lark, read by lark (LALR); names, kinds and limits are checked here, on its tree.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NoReturn

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from witcert_core.errors import ProbeError, did_you_mean, listed
from witcert_core.probes.fields import FACTS, FIELDS, KEYS, MEASURES
from witcert_core.probes.predicate import All, Always, Any_, Compared, Condition, Not, Prefixed

LONGEST = 2000
"""Characters of a probe."""
DEEPEST = 20
"""Parentheses and negations within each other."""
LARGEST = 1e15
"""Of the numbers in it: whole ones are exact as float64."""
MAX_TOP = 100
MAX_KEYS = 3
DEFAULT_ROWS, MAX_ROWS = 1000, 1_000_000
DEFAULT_SECONDS, MAX_SECONDS = 300, 86_400


@dataclass(frozen=True)
class Aggregate:
    """kind: count, max, quantize or top; measure: '' of a count; number: how many, of a top."""

    kind: str
    measure: str = ""
    number: int = 0


@dataclass(frozen=True)
class Probe:
    """What a text asks. every: one in so many rows of a request. rows, seconds: when it ends; share: of passes."""

    text: str
    aggregate: Aggregate
    by: tuple[str, ...]
    condition: Condition
    every: int
    rows: int
    seconds: int
    share: float
    names: frozenset[str]
    """The fields its condition and its groups name."""


def parse_probe(text: str, facts: Collection[str] = FACTS) -> Probe:
    """The probe that `text` writes; facts: of `FACTS`, those the engine at hand knows.

    Raises:
        ProbeError: what it cannot be, with the column.
    """
    if len(text) > LONGEST:
        raise ProbeError(1, f"the probe has {len(text)} characters; at most {LONGEST} are read")
    try:
        tree = _parser().parse(text)
    except UnexpectedInput as error:
        raise _unexpected(text, error) from error
    return _Reader(text, frozenset(facts)).probe(tree)


@cache
def _parser() -> Lark:
    grammar = files(__package__).joinpath("grammar.lark").read_text(encoding="utf-8")
    return Lark(grammar, start="probe", parser="lalr", propagate_positions=True)


def _unexpected(text: str, error: UnexpectedInput) -> ProbeError:
    if isinstance(error, UnexpectedCharacters):
        found, allowed = repr(text[error.pos_in_stream or 0]), error.allowed
    elif isinstance(error, UnexpectedToken):
        found = "the end" if error.token.type == "$END" else repr(str(error.token))
        allowed = error.accepts or error.expected
    else:
        found, allowed = "the end", set()
    column = len(text.rstrip()) + 1 if found == "the end" else (error.pos_in_stream or 0) + 1
    words = {"INT": "a whole number", "DECIMAL": "a number", "STRING": 'a text in "quotes"', "NAME": "a name"}
    words |= {"OPERATOR": "== != <= >= < >", "$END": "the end"}
    terminals = {terminal.name: terminal.pattern.value for terminal in _parser().terminals}
    expected = sorted(
        words.get(name) or repr(terminals[name]) for name in allowed or () if name in {*words, *terminals}
    )
    return ProbeError(column, f"{found} cannot stand here; expected {listed(expected)}")


class _Reader:
    """Reads the tree of one text."""

    def __init__(self, text: str, facts: frozenset[str]) -> None:
        self.text, self.facts = text, facts
        self.names: set[str] = set()

    def probe(self, tree: Tree[Token]) -> Probe:
        aggregate, *clauses = _trees(tree)
        parts = {part.data: part for part in clauses}
        wanted = self._aggregate(aggregate)
        by = self._by(parts["by"]) if "by" in parts else ()
        condition: Condition = Always()
        if "where" in parts:
            condition = self._condition(parts["where"].children[0], 0)
        limits = {part.data: part for part in _trees(parts["limits"])} if "limits" in parts else {}
        if "limits" in parts and len(limits) < len(parts["limits"].children):
            self._refuse(parts["limits"], "names a limit twice")
        return Probe(
            self.text,
            wanted,
            by,
            condition,
            every=self._whole(parts.get("every"), 1, 1, 1_000_000),
            rows=self._whole(limits.get("rows"), DEFAULT_ROWS, 1, MAX_ROWS),
            seconds=self._whole(limits.get("seconds"), DEFAULT_SECONDS, 1, MAX_SECONDS),
            share=self._share(limits.get("share")),
            names=frozenset(self.names),
        )

    def _aggregate(self, tree: Tree[Token]) -> Aggregate:
        kind = {"largest": "max"}.get(tree.data, tree.data)
        if kind == "count":
            return Aggregate(kind)
        *numbers, name = tree.children
        if str(name) not in MEASURES:
            self._refuse(name, f"no measure is called {str(name)!r}{did_you_mean(name, MEASURES)}: {listed(MEASURES)}")
        number = int(str(numbers[0])) if numbers else 0
        if numbers and not 1 <= number <= MAX_TOP:
            self._refuse(numbers[0], f"top shows 1 to {MAX_TOP}, not {number}")
        return Aggregate(kind, str(name), number)

    def _by(self, tree: Tree[Token]) -> tuple[str, ...]:
        for name in tree.children:
            if str(name) not in KEYS:
                said = f"nothing is grouped by {str(name)!r}{did_you_mean(name, KEYS)}; allowed: {listed(KEYS)}"
                self._refuse(name, said)
            self._field(name)
        keys = tuple(map(str, tree.children))
        if len(set(keys)) < len(keys) or len(keys) > MAX_KEYS:
            self._refuse(tree, f"groups by {listed(keys)}; at most {MAX_KEYS} different names are taken")
        return keys

    def _condition(self, tree: Any, depth: int) -> Condition:
        if depth > DEEPEST:
            self._refuse(tree, f"is nested more than {DEEPEST} deep")
        parts = tree.children
        if tree.data in ("either", "both"):
            found = tuple(self._condition(part, depth + 1) for part in parts)
            return Any_(found) if tree.data == "either" else All(found)
        if tree.data == "negated":
            return Not(self._condition(parts[0], depth + 1))
        name = self._field(parts[0])
        if tree.data == "compared":
            return self._compared(name, parts[1], parts[2])
        if tree.data == "prefixed":
            if FIELDS[name].kind != "text":
                self._refuse(parts[0], f"{name} is no text; startswith takes request or lora")
            return Prefixed(name, self._text(parts[1]))
        if tree.data == "one_of":
            return Any_(tuple(Compared(name, "==", self._value(name, value)) for value in parts[1:]))
        low, high = (self._value(name, value) for value in parts[1:])
        return All((Compared(name, ">=", low), Compared(name, "<=", high)))

    def _compared(self, name: str, sign: Token, value: Tree[Token]) -> Compared:
        if FIELDS[name].kind in ("text", "word") and str(sign) not in ("==", "!="):
            self._refuse(sign, f"{name} has no order; compare it with == or !=")
        return Compared(name, str(sign), self._value(name, value))

    def _field(self, token: Any) -> str:
        name = str(token)
        if name not in FIELDS:
            self._refuse(token, f"nothing is called {name!r}{did_you_mean(name, FIELDS)}; names are {listed(FIELDS)}")
        if name in FACTS and name not in self.facts:
            self._refuse(token, f"{name}: this engine does not say it of a request; leave it out")
        self.names.add(name)
        return name

    def _value(self, name: str, tree: Any) -> str | int | float:
        """The value that `name` is compared with, of the kind of `name`."""
        leaf = tree.children[0]
        field = FIELDS[name]
        if isinstance(leaf, Tree) or tree.data == "number":  # the alias of `value` around a number, or a bare one
            number: Any = leaf.children[0] if isinstance(leaf, Tree) else leaf
            if field.kind not in ("number", "measure"):
                self._refuse(number, f"{name} is compared with {_written(name)}, not with a number")
            value = int(number) if number.type == "INT" else float(number)
            if abs(value) > LARGEST:
                self._refuse(number, f"a number may have a size of {LARGEST:g} at most")
            return value
        if field.kind == "text" and leaf.type == "STRING":
            return self._text(leaf)
        if field.kind == "word" and str(leaf) in field.words:
            return str(leaf)
        self._refuse(leaf, f"{name} is compared with {_written(name)}, not with {leaf!s}")

    def _text(self, token: Any) -> str:
        try:
            return str(json.loads(token))
        except json.JSONDecodeError:
            self._refuse(token, 'is no text; write it as in JSON, \\" for a quote and \\\\ for a backslash')

    def _whole(self, tree: Tree[Token] | None, default: int, least: int, most: int) -> int:
        if tree is None:
            return default
        number = int(str(tree.children[0]))
        if not least <= number <= most:
            self._refuse(tree.children[0], f"{tree.data} may be {least} to {most}, not {number}")
        return number

    def _share(self, tree: Tree[Token] | None) -> float:
        if tree is None:
            return 1.0
        percent = float(str(tree.children[0].children[0]))  # type: ignore[union-attr]
        if not 0 < percent <= 100:
            self._refuse(tree, f"a share of passes is above 0 and at most 100 %, not {percent:g}")
        return percent / 100.0

    def _refuse(self, where: Any, message: str) -> NoReturn:
        place: int = where.start_pos if isinstance(where, Token) else where.meta.start_pos  # type: ignore[assignment]
        raise ProbeError(place + 1, message)


def _written(name: str) -> str:
    field = FIELDS[name]
    return (
        f"one of {listed(field.words)}" if field.words else {"text": 'a text in "quotes"'}.get(field.kind, "a number")
    )


def _trees(tree: Tree[Token]) -> Iterator[Tree[Token]]:
    return (child for child in tree.children if isinstance(child, Tree))
