"""Counting: which words are common in a list, which are most frequent in a text of made-up words."""

from __future__ import annotations

import random

from witcert_core.evaluate.ruler.draft import Draft
from witcert_core.evaluate.ruler.prose import words

NUM_COMMON, TIMES_RARE = 10, 2
NUM_FREQUENT, EXPONENT = 3, 2.0
NUM_CODED = 40


def common_words(rng: random.Random, size: int) -> Draft:
    """Ten words 6 to 30 times each, among `size` words twice each, in a numbered list."""
    times = min(30, 6 + size // 10)
    vocabulary = words(rng, NUM_COMMON + size, syllables=2 if size < 300 else 4)
    common, rare = vocabulary[:NUM_COMMON], vocabulary[NUM_COMMON:]
    listed = common * times + rare * TIMES_RARE
    rng.shuffle(listed)
    lines = " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))
    prompt = (
        "Below is a numbered list of words. Some of them appear more often than the others.\n\n"
        f"{lines}\n\nQuestion: Which {NUM_COMMON} words are the most common in the list?\n"
        f"Answer: The {NUM_COMMON} most common words are"
    )
    return Draft(prompt, tuple(common), f" {', '.join(common)}.", 120)


def frequent_words(rng: random.Random, size: int) -> Draft:
    """Made-up words by a power law, rank r about `1 / r^2` as often as the first; the three first are asked."""
    ranked = words(rng, NUM_CODED)
    top = 28 + 4 * size  # from 32 on the third is more frequent than the fourth
    counts = [max(1, round(top / (rank + 1) ** EXPONENT)) for rank in range(len(ranked))]
    text = [word for word, count in zip(ranked, counts, strict=True) for _ in range(count)]
    rng.shuffle(text)
    prompt = (
        "Read the following coded text and keep count of how often each coded word appears.\n\n"
        f"{' '.join(text)}\n\nQuestion: Which {NUM_FREQUENT} coded words appear most often?\n"
        f"Answer: The {NUM_FREQUENT} words that appear most often are"
    )
    expected = tuple(ranked[:NUM_FREQUENT])
    return Draft(prompt, expected, f" {', '.join(expected)}.", 48)
