"""The families of RULER (Hsieh et al. 2024, arXiv 2404.06654) in plain English, written for this project."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from witcert_core.errors import InputError, did_you_mean, listed
from witcert_core.evaluate.ruler.draft import Draft, fit
from witcert_core.evaluate.ruler.needles import multi_key, multi_query, multi_value, single_needle
from witcert_core.evaluate.ruler.questions import question_answering
from witcert_core.evaluate.ruler.tracking import variable_tracking
from witcert_core.evaluate.ruler.words import common_words, frequent_words
from witcert_core.evaluate.tasks import EvalSample, TextTokenizer

MAKERS = {
    "single_needle": single_needle,
    "multi_key": multi_key,
    "multi_value": multi_value,
    "multi_query": multi_query,
    "variable_tracking": variable_tracking,
    "common_words": common_words,
    "frequent_words": frequent_words,
    "question_answering": question_answering,
}
"""Task -> its prompt at a size."""
MIN_TOKENS = 512
"""Shorter prompts have no room for the longest question beside any text."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Natural:
    """Eight families for models that read English."""

    name: ClassVar[str] = "natural"
    tasks: ClassVar[tuple[str, ...]] = tuple(MAKERS)

    def accepts(self, tokenizer: TextTokenizer) -> bool:
        """Any tokenizer that spells letters of its own; a closed vocabulary of symbols does not."""
        vocabulary = tokenizer.get_vocab()
        return all(letter in vocabulary for letter in _LETTERS)

    def samples(
        self, task: str, num_tokens: int, count: int, seed: int, tokenizer: TextTokenizer
    ) -> Sequence[EvalSample]:
        """Prompts as long as fits `num_tokens`, special tokens not counted.

        Raises:
            InputError: an unknown task, fewer than 512 tokens, or a negative count.
        """
        if task not in MAKERS:
            raise InputError(f"unknown task {task!r}{did_you_mean(task, MAKERS)}; allowed are {listed(MAKERS)}")
        if num_tokens < MIN_TOKENS or count < 0:
            raise InputError(f"{count} prompts of {num_tokens} tokens; at least {MIN_TOKENS} tokens are needed")
        return [self._sample(task, num_tokens, f"{task}/{num_tokens}/{seed}/{i}", tokenizer) for i in range(count)]

    def _sample(self, task: str, num_tokens: int, seed: str, tokenizer: TextTokenizer) -> EvalSample:
        def draft(size: int) -> Draft:
            return MAKERS[task](random.Random(seed), size)

        def length(text: str) -> int:
            return len(tokenizer.encode(text, add_special_tokens=False))

        made = fit(draft, length, num_tokens)
        return EvalSample(task, made.prompt, made.expected, made.answer, made.scoring, made.max_new_tokens)


NATURAL = Natural()
"""The source of this package."""
