"""How far a long command is: a bar on a terminal, elsewhere a line on stderr every so often.

A log, a CI job or a batch system shows that something goes on, and what, without a terminal's control characters.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

LINE_EVERY_S = 20.0


class Shown(Protocol):
    """What is told of a command's tasks; a context manager, shown while its block runs."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def add_task(self, description: str, *, total: float | None, completed: int = 0) -> TaskID:
        """A task begins; the others are done, or were never begun."""
        ...

    def advance(self, task_id: TaskID) -> None:
        """One step of a task more."""
        ...


class ProgressLines:
    """A line on stderr every `every_s` seconds about the task begun last; nothing of commands shorter than that."""

    def __init__(self, every_s: float = LINE_EVERY_S) -> None:
        self._every_s = every_s
        self._tasks: list[tuple[str, float | None]] = []
        self._done: list[int] = []
        self._begun = time.monotonic()
        self._ended = threading.Event()
        # A daemon, for an interpreter that ends in the block must not wait for it; it runs nothing but Python.
        self._thread = threading.Thread(target=self._tell, name="witcert-progress", daemon=True)

    def __enter__(self) -> Self:
        self._begun = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._ended.set()
        self._thread.join()

    def add_task(self, description: str, *, total: float | None, completed: int = 0) -> TaskID:
        self._done.append(completed)
        self._tasks.append((description, total))
        return TaskID(len(self._tasks) - 1)

    def advance(self, task_id: TaskID) -> None:
        self._done[task_id] += 1

    def line(self) -> str:
        """The task begun last: how many of its steps are done, and how long the command has taken."""
        description, total = self._tasks[-1]
        seconds = time.monotonic() - self._begun
        return f"witcert: {description}: {self._done[len(self._tasks) - 1]} of {total:g} done after {seconds:.0f} s"

    def _tell(self) -> None:
        while not self._ended.wait(self._every_s):
            if self._tasks:
                print(self.line(), file=sys.stderr, flush=True)


def progress(console: Console) -> Shown:
    """A bar where `console` is a terminal, else lines on stderr."""
    if not console.is_terminal:
        return ProgressLines()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)
