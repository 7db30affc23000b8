"""A prompt that can be made longer: the largest size that fits a number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from witcert_core.errors import InputError
from witcert_core.evaluate.tasks import Scoring


@dataclass(frozen=True)
class Draft:
    """A prompt and what is expected of it; see `EvalSample`."""

    prompt: str
    expected: tuple[str, ...]
    answer: str
    max_new_tokens: int
    scoring: Scoring = "all"


def fit(draft: Callable[[int], Draft], length: Callable[[str], int], num_tokens: int) -> Draft:
    """The longest draft of at most `num_tokens`; `draft(size)` must grow with its size, from size 1.

    Raises:
        InputError: not even the smallest fits.
    """
    best = draft(1)
    smallest = length(best.prompt)
    if smallest > num_tokens:
        raise InputError(f"the shortest prompt of this task has {smallest} tokens; {num_tokens} are too few")
    low, high = 1, 2
    while length((longer := draft(high)).prompt) <= num_tokens:
        best, low, high = longer, high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        candidate = draft(middle)
        if length(candidate.prompt) <= num_tokens:
            best, low = candidate, middle
        else:
            high = middle
    return best


def scatter(filler: list[str], needles: list[str], places: list[float]) -> str:
    """Sentences of `filler` with each needle put in at its place in [0, 1), as one text."""
    spots = sorted(zip(places, needles, strict=True), key=lambda spot: spot[0])
    parts: list[str] = []
    taken = 0
    for place, needle in spots:
        upto = int(place * (len(filler) + 1))
        parts += filler[taken:upto]
        taken = max(taken, upto)
        parts.append(needle)
    return " ".join(parts + filler[taken:])
