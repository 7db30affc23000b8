"""The curriculum: what the model sees at each training step.

Copying comes first because it forms the attention pattern that lookup needs (find an earlier occurrence, read
what followed); without it, or with several keys per question from the start, training stalls on a plateau.
Several keys come while the learning rate is still high: introduced after its decay they were never learned
(four-key accuracy below .2 where one key and chains were at 1.0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from witcert_demo import vocabulary as vocab
from witcert_demo.documents import Lookup, Plan, Question, TokenBatch, Trace, render

_MAX_RECORDS = 40


@dataclass(frozen=True)
class Stage:
    """``num_steps`` batches of about ``batch_tokens`` tokens with contexts of ``min_context..max_context``.

    ``max_keys`` is the largest number of keys one question asks for; 0 makes it a copying stage with
    sequences of ``max_context`` tokens.
    """

    num_steps: int
    min_context: int
    max_context: int
    batch_tokens: int
    max_keys: int


CURRICULUM: tuple[Stage, ...] = (
    Stage(300, 64, 64, 4096, 0),
    Stage(300, 32, 64, 4096, 1),
    Stage(350, 64, 128, 6144, 3),
    Stage(450, 96, 256, 8192, 4),
    Stage(300, 192, 512, 8192, 4),
    Stage(150, 400, 1000, 12288, 4),
)

SMOKE: tuple[Stage, ...] = (Stage(80, 16, 16, 1024, 0), Stage(5, 32, 48, 1024, 1))
"""Seconds instead of minutes: shows that the loss falls, teaches nothing."""


def copying_batch(rng: np.random.Generator, batch: int, num_tokens: int) -> TokenBatch:
    """A random phrase repeated to the end; the repetition, once its place is known, is the answer."""
    period = int(rng.integers(max(4, num_tokens // 4), num_tokens // 2 + 1))
    phrase = rng.integers(vocab.FIRST_VALUE, vocab.FIRST_FILLER + vocab.NUM_PER_CLASS, (batch, period))
    ids = np.full((batch, num_tokens), vocab.BOS, dtype=np.int64)
    ids[:, 1:] = np.tile(phrase, (1, -(-num_tokens // period)))[:, : num_tokens - 1]
    is_answer = np.zeros(ids.shape, dtype=np.bool_)
    is_answer[:, period + 2 :] = True
    return TokenBatch(ids, is_answer, period + 2)


def question_batch(rng: np.random.Generator, stage: Stage) -> TokenBatch:
    """Documents with a random plan and many questions each: every question is one more training signal."""
    num_context = round(math.exp(rng.uniform(math.log(stage.min_context), math.log(stage.max_context))))
    capacity = min(_MAX_RECORDS, max(3, num_context // 8))
    chains: list[int] = []
    for _ in range(int(rng.integers(0, 3))):
        num_aliases = int(rng.integers(1, 4))
        if sum(1 + other for other in chains) + 1 + num_aliases < capacity:
            chains.append(num_aliases)
    room = capacity - sum(1 + num_aliases for num_aliases in chains)
    # One context in ten holds a single record, the layout of the single-needle task.
    num_records = 1 if rng.random() < 0.1 else int(rng.integers(1, room + 1))

    questions: list[Question] = [Trace(chain) for chain in range(len(chains))]
    waiting = [int(record) for record in rng.permutation(num_records)]
    budget = max(40, min(200, num_context // 2))
    while waiting and budget > 0:
        num_keys = 1
        if stage.max_keys > 1 and rng.random() < 0.6:
            num_keys = int(rng.integers(2, stage.max_keys + 1))
        asked, waiting = tuple(waiting[:num_keys]), waiting[num_keys:]
        questions.append(Lookup(asked))
        budget -= 3 + 4 * len(asked)
    order = rng.permutation(len(questions))
    longest = 1 + num_context + sum(_question_tokens(question, chains) for question in questions)
    return render(
        rng,
        max(1, stage.batch_tokens // longest),
        Plan(num_context, num_records, tuple(chains)),
        [questions[int(index)] for index in order],
    )


def _question_tokens(question: Question, chains: list[int]) -> int:
    if isinstance(question, Lookup):
        return 3 + 4 * len(question.records)
    return 3 + 1 + chains[question.chain] + 3


def batch_of_step(curriculum: tuple[Stage, ...], seed: int, step: int) -> TokenBatch:
    """The batch of training step ``step``: a function of the curriculum, the seed and the step alone.

    That is what lets a run resume at any step with no generator state to keep.
    """
    rng = np.random.default_rng([seed, step])
    first = 0
    for stage in curriculum:
        if step < first + stage.num_steps:
            if stage.max_keys == 0:
                return copying_batch(rng, stage.batch_tokens // stage.max_context, stage.max_context)
            return question_batch(rng, stage)
        first += stage.num_steps
    raise ValueError(f"step {step} is past the curriculum's last step {first - 1}")


def num_steps(curriculum: tuple[Stage, ...]) -> int:
    return sum(stage.num_steps for stage in curriculum)
