"""Where evaluation samples come from: task sources, found by entry point, and what a sample is.

A distribution adds a source with an entry point of the group `witcert.tasks` that names a `TaskSource` object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

Scoring = Literal["all", "any", "exact"]


class TextTokenizer(Protocol):
    """What a source may ask of a tokenizer; transformers' tokenizers fit."""

    def encode(self, text: str, /, *, add_special_tokens: bool = ...) -> list[int]: ...

    def get_vocab(self) -> Mapping[str, int]: ...


@dataclass(frozen=True)
class EvalSample:
    """One question.

    expected: the answers looked for. scoring: `all`, the share of them found; `any`, 1 if one is; `exact`, 1 if the
    output is the first one and nothing else. answer: what a perfect model writes, fed in where answers are forced.
    """

    task: str
    prompt: str
    expected: tuple[str, ...]
    answer: str
    scoring: Scoring = "all"
    max_new_tokens: int = 64


@runtime_checkable
class TaskSource(Protocol):
    """A family of tasks, at any prompt length."""

    name: ClassVar[str]
    tasks: ClassVar[tuple[str, ...]]

    def accepts(self, tokenizer: TextTokenizer) -> bool:
        """Whether these prompts mean something to a model with this tokenizer."""
        ...

    def samples(
        self, task: str, num_tokens: int, count: int, seed: int, tokenizer: TextTokenizer
    ) -> Sequence[EvalSample]:
        """`count` samples of at most `num_tokens` prompt tokens; sample i depends on the other arguments and i only."""
        ...


def score(sample: EvalSample, output: str) -> float:
    """Between 0 and 1; case does not count, except in `exact`."""
    if sample.scoring == "exact":
        return float(output.split() == sample.expected[0].split())
    text = output.lower()
    found = [word.lower() in text for word in sample.expected]
    return float(any(found)) if sample.scoring == "any" else sum(found) / len(found)
