"""What cannot be metered, as rows of tables: a server is stopped by them, and `docs/limits.md` is made of them.

Texts are Markdown, as the page shows them; a message leaves the backticks out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic, TypeVar

from witcert_core.cache.schedule import QuantizeSchedule
from witcert_core.errors import UnsupportedError
from witcert_core.quantizers.base import Quantizer

UNSET = ", or unset WITCERT_POLICY to serve without a meter"
"""How the message of a server that was started with something else ends."""

T = TypeVar("T")
Examined = TypeVar("Examined", contravariant=True)


@dataclass(frozen=True)
class Refusal(Generic[Examined]):
    """One thing that is not metered.

    what: as the page calls it. why, instead: for the page and for the message. found: what of an object examined is
    such a thing, as the message calls it, '' or False if nothing is; None where the code that meets it raises itself.
    """

    what: str
    why: str
    instead: str
    found: Callable[[Examined], str | bool | None] | None = None

    def where(self, found: Callable[[T], str | bool | None]) -> Refusal[T]:
        """The same, recognised otherwise."""
        return Refusal(self.what, self.why, self.instead, found)

    def error(self, found: str, otherwise: str = "") -> UnsupportedError:
        """The error of one line; otherwise: how it ends."""
        return UnsupportedError(f"{found}: {self.why}; {self.instead}{otherwise}".replace("`", ""))


@dataclass(frozen=True)
class Option:
    """An option of an engine of which one value is metered.

    name: the attribute that holds it. called: what the option is. why: other values are refused. flag: as users write
    it, where it is not the name.
    """

    name: str
    allowed: Any
    called: str
    why: str
    flag: str = ""

    def row(self, options: Callable[[T], Any]) -> Refusal[T]:
        """options: what has the attribute, of what is examined."""
        flag = self.flag or "--" + self.name.replace("_", "-")
        what = f"`{flag}`"
        if self.allowed:
            what += f" {'above' if isinstance(self.allowed, int) else 'other than'} `{self.allowed}`"

        def found(examined: T) -> str:
            value = getattr(options(examined), self.name)
            if value == self.allowed or not (value or self.allowed):  # unset options are None or False
                return ""
            return f"{flag} ({self.called})" if value is True else f"{flag} {value} ({self.called})"

        instead = f"use `{self.allowed}`" if self.allowed else "leave it out"
        return Refusal(f"{what} ({self.called})", self.why, instead, found)


@dataclass(frozen=True)
class Section:
    """Rows of the page under one heading."""

    title: str
    rows: Sequence[Refusal[Any]]


CACHE_ROWS: tuple[Refusal[Any], ...] = (
    Refusal(
        "a quantizer of keys before RoPE, with a layer that has no rotary embedding or one without a plain table of "
        "positions (M-RoPE, LongRoPE)",
        "the key before RoPE is had back from the engine's own table, which is checked on random keys at start",
        "use a quantizer of keys after RoPE",
    ),
    Refusal(
        "`quantizer.storage: packed` on the CPU, under a gate that repairs or of a quantizer without dither, with "
        "logit caps, windows or sinks",
        "plain torch attends there, without them (found in the first pass)",
        "set `quantizer.storage` to 'simulated'",
    ),
    Refusal(
        "`quantizer.storage: packed` of a dithered quantizer on a GPU, with `meter.form: extremal` or codes of its own",
        "the kernels write `int8_dither` and its variants, and give sums, not tokens",
        "set `quantizer.storage` to 'simulated'",
    ),
)
"""Refused where the cache is built or first read, in every engine."""


def refuse(rows: Iterable[Refusal[T]], asked: T, otherwise: str = "") -> None:
    """Raise UnsupportedError for the first row that finds something in `asked`; otherwise: how its message ends."""
    for row in rows:
        if row.found is not None and (found := row.found(asked)):
            raise row.error(str(found), otherwise)


def markdown(sections: Iterable[Section]) -> str:
    """The tables of the page: neighbours with the same reason share a row, and what is said twice is said once."""
    parts = []
    for section in sections:
        lines = []
        for (why, instead), rows in groupby(section.rows, key=lambda row: (row.why, row.instead)):
            what = "; ".join(dict.fromkeys(row.what for row in rows))
            lines.append(f"| {what} | {why} | {instead} |")
        head = [f"### {section.title}", "", "| what | why | instead |", "|---|---|---|"]
        parts.append("\n".join([*head, *dict.fromkeys(lines)]))
    return "\n\n".join(parts) + "\n"


def split_groups(quantizer: Quantizer, unit: int) -> str | bool:
    """What of a quantizer two requests could share a part of, if they share prefixes in units of `unit` tokens."""
    rule = QuantizeSchedule.of(quantizer)
    takes = f"quantizer.name: {quantizer.name} takes {rule.sharing_unit} tokens together"
    return not rule.may_share(unit) and f"{takes}, and requests share prefixes in units of {unit}"
