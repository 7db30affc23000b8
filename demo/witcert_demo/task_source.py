"""The needle tasks as a source for `witcert eval`, registered by the entry point group `witcert.tasks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from witcert_core.errors import InputError
from witcert_core.evaluate.tasks import EvalSample, TextTokenizer
from witcert_demo.tasks import TASKS, make_samples
from witcert_demo.vocabulary import END, SYMBOLS

_MAX_NEW_TOKENS = 16


class Needles:
    """Prompts in the closed vocabulary, of exactly the length asked for; an answer counts only as a whole."""

    name: ClassVar[str] = "needles"
    tasks: ClassVar[tuple[str, ...]] = TASKS

    def accepts(self, tokenizer: TextTokenizer) -> bool:
        """A tokenizer that knows every symbol of this vocabulary."""
        vocabulary = tokenizer.get_vocab()
        return all(symbol in vocabulary for symbol in SYMBOLS)

    def samples(
        self, task: str, num_tokens: int, count: int, seed: int, tokenizer: TextTokenizer
    ) -> Sequence[EvalSample]:
        """`count` samples; InputError for what `witcert_demo.tasks.make_samples` refuses."""
        try:
            made = make_samples(task, num_tokens, count, seed)
        except ValueError as error:
            raise InputError(f"task source {self.name!r}: {error}") from error
        return [
            EvalSample(
                task=task,
                prompt=sample.prompt,
                expected=(sample.answer.removesuffix(f" {SYMBOLS[END]}"),),
                answer=sample.answer,
                scoring="exact",
                max_new_tokens=_MAX_NEW_TOKENS,
            )
            for sample in made
        ]


NEEDLES = Needles()
"""The object the entry point names."""
