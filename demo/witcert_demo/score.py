"""Strict scoring: an answer is right when it is the expected one, symbol for symbol."""

from __future__ import annotations

from collections.abc import Sequence

from witcert_demo.tasks import Sample
from witcert_demo.vocabulary import END, SYMBOLS


def exact_match(sample: Sample, output_ids: Sequence[int]) -> bool:
    """Whether generated ``output_ids`` answer ``sample``.

    Everything up to and including the first ``<end>`` counts and must equal the answer. An engine that strips
    the stop token may end without it; an output that never stopped (longer, no ``<end>``) is wrong.
    """
    output = list(output_ids)
    if END in output:
        output = output[: output.index(END) + 1]
    answer = list(sample.answer_ids)
    return output in (answer, answer[:-1])


def exact_match_text(sample: Sample, output: str) -> bool:
    """``exact_match`` for an engine that answers in text: the same rule on blank-separated symbols."""
    words = output.split()
    end = SYMBOLS[END]
    if end in words:
        words = words[: words.index(end) + 1]
    answer = sample.answer.split()
    return words in (answer, answer[:-1])


def accuracy(outcomes: Sequence[bool]) -> float:
    """Share of right answers. Raises ``ValueError`` for none: no answer is not a score."""
    if not outcomes:
        raise ValueError("no outcomes to score; evaluate at least one sample")
    return sum(outcomes) / len(outcomes)
