"""The needle tasks: prompts of an exact token count with one strict answer each.

``single_needle`` one record in filler; ``multi_key`` the same among up to 32 records; ``multi_query`` four of
them asked at once; ``variable_tracking`` a chain of two aliases, beside a second chain and other records.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from witcert_demo.documents import RECORD_WIDTH, Lookup, Plan, Question, Trace, render
from witcert_demo.vocabulary import decode

TASKS: tuple[str, ...] = ("single_needle", "multi_key", "multi_query", "variable_tracking")

_MIN_TOKENS = 48
_MAX_TOKENS = 1984


@dataclass(frozen=True)
class Sample:
    """One prompt and the answer that alone counts as right. The texts spell the ids, ``<end>`` included."""

    prompt: str
    prompt_ids: tuple[int, ...]
    answer: str
    answer_ids: tuple[int, ...]
    task: str


def _layout(task: str, num_tokens: int) -> tuple[Plan, Question]:
    """Plan and question of ``task`` for a prompt of ``num_tokens``, ``<bos>`` and question included."""
    question: Question = Lookup((0, 1, 2, 3)) if task == "multi_query" else Lookup((0,))
    num_question_tokens = 2 + (4 if task == "multi_query" else 1)
    num_context = num_tokens - 1 - num_question_tokens
    num_records = min(32, max(4, num_context // 16))
    chains: tuple[int, ...] = ()
    if task == "single_needle":
        num_records = 1
    elif task == "variable_tracking":
        question = Trace(0)
        chains = (2, 2)
        num_records = max(1, min(num_records // 4, num_context // RECORD_WIDTH - 6))
    return Plan(num_context, num_records, chains), question


def make_samples(task: str, num_tokens: int, count: int, seed: int) -> list[Sample]:
    """``count`` samples of ``task``, every prompt exactly ``num_tokens`` long.

    Sample i depends on (task, num_tokens, seed, i) only, so a longer list begins with the shorter one.
    Raises ``ValueError`` for an unknown task, a length outside 48..1984 or a negative count.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; allowed are {', '.join(TASKS)}")
    if not _MIN_TOKENS <= num_tokens <= _MAX_TOKENS:
        raise ValueError(f"num_tokens is {num_tokens}; allowed are {_MIN_TOKENS}..{_MAX_TOKENS}")
    if count < 0:
        raise ValueError(f"count is {count}; it must not be negative")
    plan, question = _layout(task, num_tokens)
    samples: list[Sample] = []
    for index in range(count):
        rng = np.random.default_rng([seed, TASKS.index(task), num_tokens, index])
        batch = render(rng, 1, plan, [question])
        ids = tuple(batch.ids[0].tolist())
        prompt_ids, answer_ids = ids[: batch.first_answer], ids[batch.first_answer :]
        samples.append(Sample(decode(prompt_ids), prompt_ids, decode(answer_ids), answer_ids, task))
    return samples
