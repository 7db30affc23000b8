"""Ask every sample of everyone who was not asked it yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import chain

from rich.console import Console

from witcert_core.evaluate.askers import Asker, Reply
from witcert_core.evaluate.progress import progress
from witcert_core.evaluate.records import Key, RecordFile, SampleRecord, meter_of
from witcert_core.evaluate.servers import held_signals
from witcert_core.evaluate.tasks import EvalSample, TaskSource, TextTokenizer, score

Wanted = Sequence[Sequence[tuple[EvalSample, Key]]]
"""Samples of a task and length, part after part, each with the key of its record."""


@dataclass(frozen=True)
class Plan:
    """What is asked: `count` samples of every task at every length."""

    source: TaskSource
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    count: int
    seed: int

    def samples(self, task: str, num_tokens: int, tokenizer: TextTokenizer) -> Sequence[EvalSample]:
        return self.source.samples(task, num_tokens, self.count, self.seed, tokenizer)


def run(plan: Plan, askers: Sequence[Asker], tokenizer: TextTokenizer, file: RecordFile, console: Console) -> int:
    """Append a record for each answer; returns how many were new. A sample that has its record is not asked again."""
    for asker in askers:
        file.claim(asker.quantizer, asker.mode, asker.settings)
    new = 0
    with progress(console) as shown:
        for asker in askers:
            open_parts = [
                (missing, plan.samples(task, num_tokens, tokenizer))  # made before a server is started for them
                for task in plan.tasks
                for num_tokens in plan.lengths
                if (missing := _missing(plan, asker, task, num_tokens, file))
            ]
            total = len(plan.tasks) * len(plan.lengths) * plan.count
            left = sum(len(missing) for missing, _ in open_parts)
            bar = shown.add_task(f"{asker.quantizer} {asker.mode}", total=total, completed=total - left)
            if not open_parts:
                continue
            wanted = [[(samples[key[4]], key) for key in missing] for missing, samples in open_parts]
            asker.open()
            ask_all = _one_by_one if asker.parallel == 1 else _side_by_side
            new += ask_all(asker, wanted, file, partial(shown.advance, bar))
    return new


def _missing(plan: Plan, asker: Asker, task: str, num_tokens: int, file: RecordFile) -> list[Key]:
    keys = [(asker.quantizer, asker.mode, task, num_tokens, i) for i in range(plan.count)]
    return [key for key in keys if not file.has(key)]


def _one_by_one(asker: Asker, parts: Wanted, file: RecordFile, advance: Callable[[], None]) -> int:
    """Asked by this very thread: a signal ends the answer at once, and no thread is left in a tensor operation."""
    new = 0
    try:
        for sample, key in chain.from_iterable(parts):
            file.add(_ask(asker, sample, key))
            advance()
            new += 1
    finally:
        asker.close()
    return new


def _side_by_side(asker: Asker, parts: Wanted, file: RecordFile, advance: Callable[[], None]) -> int:
    new = 0
    pool = ThreadPoolExecutor(asker.parallel)
    try:
        for part in parts:
            with held_signals():  # a thread that is just being started would be in nobody's list
                futures = [pool.submit(_ask, asker, sample, key) for sample, key in part]
            for future in as_completed(futures):
                file.add(future.result())
                advance()
                new += 1
    finally:
        # A wait for threads that a second signal interrupts counts them as ended; the interpreter's end then aborts.
        with held_signals():
            asker.close()  # a server that is stopped answers no more, so there is little to wait for
            pool.shutdown(cancel_futures=True)  # after an error: what has not begun need not
    return new


def _ask(asker: Asker, sample: EvalSample, key: Key) -> SampleRecord:
    begun = time.monotonic()
    reply: Reply = asker.ask(sample, "/".join(map(str, key)))
    quantizer, mode, task, num_tokens, index = key
    return SampleRecord(
        quantizer=quantizer,
        mode=mode,
        task=task,
        num_tokens=num_tokens,
        index=index,
        score=score(sample, reply.text),
        answer=reply.text,
        expected=list(sample.expected),
        engine=asker.engine if reply.summary is None else str(reply.summary["engine"]),
        seconds=round(time.monotonic() - begun, 3),
        meter=meter_of(reply.summary),
    )
