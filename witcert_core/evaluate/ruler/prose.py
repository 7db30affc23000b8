"""Text without meaning for the questions: sentences from a small grammar, and words from syllables."""

from __future__ import annotations

import random

_SUBJECTS = (
    "The harbour",
    "A narrow road",
    "The old mill",
    "Morning fog",
    "The market",
    "A row of lamps",
    "The orchard",
    "The ferry",
    "A stone wall",
    "The reading room",
    "The lower field",
    "Rain",
    "The workshop",
)
_VERBS = (
    "lay beside",
    "ran past",
    "could be seen from",
    "was quieter than",
    "smelled of",
    "led back to",
    "stood above",
    "was painted after",
    "kept the warmth of",
    "was rebuilt near",
    "took its name from",
)
_OBJECTS = (
    "the river",
    "the station",
    "the empty square",
    "the chestnut trees",
    "the hill",
    "the bakery",
    "the quay",
    "the northern gate",
    "the meadow",
    "an early winter",
    "the tower clock",
    "the far shore",
    "the garden",
)
_ENDS = (
    "in spring",
    "for most of the year",
    "before the bell rang",
    "as everyone knew",
    "on calm days",
    "at dusk",
    "until the evening",
    "without a sound",
    "as it always had",
    "when the wind turned",
    "by then",
    "again",
)
_SYLLABLES = (
    "ba",
    "den",
    "fi",
    "gor",
    "hal",
    "jun",
    "ka",
    "lem",
    "mi",
    "nor",
    "pel",
    "qui",
    "ros",
    "sto",
    "tam",
    "vel",
    "wen",
    "xa",
    "yor",
    "zim",
    "cal",
    "du",
    "eth",
    "fro",
    "gla",
    "hin",
)


def sentences(rng: random.Random, count: int) -> list[str]:
    """`count` sentences; a longer list from the same state begins with the shorter one."""
    parts = (_SUBJECTS, _VERBS, _OBJECTS, _ENDS)
    return [" ".join(rng.choice(part) for part in parts) + "." for _ in range(count)]


def words(rng: random.Random, count: int, syllables: int = 3) -> list[str]:
    """`count` different made-up words."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choice(_SYLLABLES) for _ in range(syllables))] = None
    return list(found)


def number(rng: random.Random, digits: int = 7) -> str:
    """A number that does not begin with 0."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def enumerate_words(items: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else items[0]
