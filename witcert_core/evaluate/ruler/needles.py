"""Needles in a haystack: one or many numbers hidden in prose, or among other numbers of the same kind."""

from __future__ import annotations

import random

from witcert_core.evaluate.ruler.draft import Draft, scatter
from witcert_core.evaluate.ruler.prose import enumerate_words, number, sentences, words

NUM_VALUES = NUM_QUERIES = 4
_INTRO = "A text follows in which some code numbers are hidden. Remember them; you will be asked about them afterwards."


def _needle(key: str, value: str) -> str:
    return f"One of the code numbers for {key} is {value}."


def _ask(text: str, keys: list[str], answers: list[str], values: list[str]) -> Draft:
    """Question about `keys`; every value is expected. The prompt ends where the answer begins."""
    many = len(values) > 1
    which = f"all code numbers for {enumerate_words(keys)}" if many else f"the code number for {keys[0]}"
    verb = "are" if many else "is"
    prompt = f"{_INTRO}\n\n{text}\n\nQuestion: What {verb} {which} in the text above?\n"
    prompt += f"Answer: {which[0].upper()}{which[1:]} in the text {verb}"
    return Draft(prompt, tuple(values), f" {enumerate_words(answers)}.", 24 + 24 * len(values))


def single_needle(rng: random.Random, size: int) -> Draft:
    """One number in `size` sentences of prose."""
    (key,), value, place = words(rng, 1), number(rng), rng.random()
    text = scatter(sentences(rng, size), [_needle(key, value)], [place])
    return _ask(text, [key], [value], [value])


def multi_key(rng: random.Random, size: int) -> Draft:
    """A haystack of needles: `size` keys with a number each, one of them asked."""
    key, *others = words(rng, size + 1, syllables=4)
    place = rng.random()
    value, *wrong = [number(rng) for _ in range(size + 1)]
    hay = [_needle(k, v) for k, v in zip(others, wrong, strict=True)]
    return _ask(scatter(hay, [_needle(key, value)], [place]), [key], [value], [value])


def multi_value(rng: random.Random, size: int) -> Draft:
    """One key with four numbers, all asked."""
    (key,) = words(rng, 1)
    values, places = [number(rng) for _ in range(NUM_VALUES)], [rng.random() for _ in range(NUM_VALUES)]
    in_order = [v for _, v in sorted(zip(places, values, strict=True))]
    text = scatter(sentences(rng, size), [_needle(key, v) for v in values], places)
    return _ask(text, [key], in_order, values)


def multi_query(rng: random.Random, size: int) -> Draft:
    """Four keys with a number each, all asked."""
    keys = words(rng, NUM_QUERIES)
    values, places = [number(rng) for _ in keys], [rng.random() for _ in keys]
    text = scatter(sentences(rng, size), [_needle(k, v) for k, v in zip(keys, values, strict=True)], places)
    return _ask(text, keys, values, values)
