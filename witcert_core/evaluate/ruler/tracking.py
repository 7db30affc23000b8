"""Variable tracking: follow assignments through a text."""

from __future__ import annotations

import random
from itertools import pairwise

from witcert_core.evaluate.ruler.draft import Draft, scatter
from witcert_core.evaluate.ruler.prose import sentences

HOPS = 4
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


def _names(rng: random.Random, count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choice(_LETTERS) for _ in range(5))] = None
    return list(found)


def _chain(names: list[str], value: str) -> list[str]:
    first = f"VAR {names[0]} = {value}."
    return [first, *(f"VAR {name} = VAR {source}." for source, name in pairwise(names))]


def variable_tracking(rng: random.Random, size: int) -> Draft:
    """A value assigned to a variable and copied four times, beside a second chain; all five names are expected."""
    names = _names(rng, 2 * (HOPS + 1))
    value, other = (str(rng.randrange(10000, 100000)) for _ in range(2))
    asked, distraction = names[: HOPS + 1], names[HOPS + 1 :]
    needles, places = [], []
    for chain, number in ((asked, value), (distraction, other)):
        needles += _chain(chain, number)
        places += sorted(rng.random() for _ in chain)  # an assignment comes after the one it copies
    text = scatter(sentences(rng, size), needles, places)
    prompt = (
        "The assignments hidden in the text below copy a value from variable to variable.\n\n"
        f"{text}\n\nQuestion: Which variables are assigned the value {value}, directly or through others?\n"
        f"Answer: The {HOPS + 1} variables with the value {value} are"
    )
    return Draft(prompt, tuple(asked), f" {', '.join(asked)}.", 48)
