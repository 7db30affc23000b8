"""Documents of the needle tasks: records scattered in filler, then questions with spelled-out answers.

A *record* ``key v1 v2`` gives a key its two-digit values; an *alias* ``key other`` sends a key to another
one; a *chain* is a record and the aliases that lead to it. A question ``ask k ... :`` is answered by
``k v1 v2`` for every key asked, a chain by the keys on its way first (``y x k v1 v2``), then ``<end>``. The
answer repeats the key so that its values are produced by decode steps, which read the cache; without the
repetition the first value would come out of prefill and no cache error could be seen in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from witcert_demo import vocabulary as vocab

RECORD_WIDTH = 3
"""Tokens a record takes; an alias takes the same room, its third token being filler."""

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Plan:
    """What every document of a batch holds; keys, values and places differ from row to row.

    ``chains[i]`` is the number of aliases of chain i; keys are counted records first, then chain by chain,
    each from its root outwards.
    """

    num_context_tokens: int
    num_records: int
    chains: tuple[int, ...] = ()

    @property
    def num_keys(self) -> int:
        return self.num_records + sum(1 + num_aliases for num_aliases in self.chains)

    def chain_keys(self, chain: int) -> list[int]:
        """Key numbers of ``chain`` from its root to its last alias."""
        first = self.num_records + sum(1 + num_aliases for num_aliases in self.chains[:chain])
        return list(range(first, first + 1 + self.chains[chain]))

    def target_of(self) -> dict[int, int]:
        """Alias key number -> the key number it points to."""
        targets: dict[int, int] = {}
        for chain in range(len(self.chains)):
            keys = self.chain_keys(chain)
            targets.update(zip(keys[1:], keys[:-1], strict=True))
        return targets


@dataclass(frozen=True)
class Lookup:
    """Ask for the values of some records, by record number."""

    records: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """Ask for the value at the root of a chain, starting from its last alias."""

    chain: int


Question = Lookup | Trace


@dataclass(frozen=True)
class TokenBatch:
    """``ids`` [B, T]; ``is_answer`` [B, T], the tokens a model must produce; index of the first of them."""

    ids: Ids
    is_answer: Mask
    first_answer: int


def _place_records(rng: np.random.Generator, batch: int, plan: Plan) -> Ids:
    """Starts [B, num_keys] of non-overlapping records in the context, in random order."""
    spare = (RECORD_WIDTH - 1) * plan.num_keys
    room = plan.num_context_tokens - spare
    if plan.num_keys > vocab.NUM_PER_CLASS or room < plan.num_keys:
        raise ValueError(
            f"{plan.num_keys} records do not fit a context of {plan.num_context_tokens} tokens; a record "
            f"takes {RECORD_WIDTH} tokens and there are {vocab.NUM_PER_CLASS} keys"
        )
    # Choosing among `room` places and spreading them makes every layout without overlap equally likely.
    chosen = np.sort(np.argsort(rng.random((batch, room)), axis=1)[:, : plan.num_keys], axis=1)
    starts = chosen + (RECORD_WIDTH - 1) * np.arange(plan.num_keys)
    return np.take_along_axis(starts, np.argsort(rng.random((batch, plan.num_keys)), axis=1), axis=1)


def render(rng: np.random.Generator, batch: int, plan: Plan, questions: list[Question]) -> TokenBatch:
    """Draw ``batch`` documents after ``plan``: ``<bos>``, context, then every question with its answer."""
    starts = _place_records(rng, batch, plan)
    classes = rng.random((batch, vocab.NUM_PER_CLASS))
    keys = vocab.FIRST_KEY + np.argsort(classes, axis=1)[:, : plan.num_keys]
    values = vocab.FIRST_VALUE + rng.integers(0, vocab.NUM_PER_CLASS, (batch, plan.num_keys, 2))
    context = vocab.FIRST_FILLER + rng.integers(0, vocab.NUM_PER_CLASS, (batch, plan.num_context_tokens))

    rows = np.arange(batch)
    targets = plan.target_of()
    for key in range(plan.num_keys):
        context[rows, starts[:, key]] = keys[:, key]
        if key in targets:
            context[rows, starts[:, key] + 1] = keys[:, targets[key]]
        else:
            context[rows, starts[:, key] + 1] = values[:, key, 0]
            context[rows, starts[:, key] + 2] = values[:, key, 1]

    def mark(token_id: int) -> Ids:
        return np.full((batch, 1), token_id)

    def key_column(key: int) -> Ids:
        return keys[:, key : key + 1]

    pieces: list[tuple[Ids, bool]] = [(mark(vocab.BOS), False), (context, False)]
    first_answer = 0
    for question in questions:
        if isinstance(question, Lookup):
            asked = [key_column(key) for key in question.records]
            answer = [part for key in question.records for part in (key_column(key), values[:, key])]
        else:
            way = plan.chain_keys(question.chain)[::-1]
            asked = [key_column(way[0])]
            answer = [*(key_column(key) for key in way), values[:, way[-1]]]
        pieces += [(part, False) for part in [mark(vocab.ASK), *asked, mark(vocab.COLON)]]
        first_answer = first_answer or sum(piece.shape[1] for piece, _ in pieces)
        pieces += [(part, True) for part in [*answer, mark(vocab.END)]]
    return TokenBatch(
        ids=np.concatenate([piece for piece, _ in pieces], axis=1).astype(np.int64),
        is_answer=np.concatenate([np.full(piece.shape, wanted) for piece, wanted in pieces], axis=1),
        first_answer=first_answer,
    )
