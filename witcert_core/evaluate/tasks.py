"""Where evaluation samples come from: task sources, found by entry point, and what a sample is.

A distribution adds a source with an entry point of the group `witcert.tasks` that names a `TaskSource` object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import ClassVar, Literal, Protocol, runtime_checkable

from witcert_core.errors import InputError, PluginError
from witcert_core.suggest import did_you_mean, listed

GROUP = "witcert.tasks"
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


def task_sources(found: Sequence[EntryPoint] | None = None) -> dict[str, TaskSource]:
    """All sources by name, this package's own last.

    Raises:
        PluginError: an entry point fails to load, or is no source, or takes a name in use.
    """
    from witcert_core.evaluate.ruler import NATURAL

    sources: dict[str, TaskSource] = {}
    for entry in entry_points(group=GROUP) if found is None else found:
        where = f"entry point {entry.name!r} ({entry.value}) of group {GROUP}"
        try:
            source = entry.load()
        except (ImportError, AttributeError) as error:
            raise PluginError(f"{where} failed to load: {error}; fix or uninstall its distribution") from error
        if not isinstance(source, TaskSource):
            raise PluginError(f"{where} is no task source: it needs name, tasks, accepts and samples")
        if sources.setdefault(source.name, source) is not source or source.name == NATURAL.name:
            raise PluginError(f"{where}: the name {source.name!r} is taken; rename the source")
    sources[NATURAL.name] = NATURAL
    return sources


def choose_source(name: str, tokenizer: TextTokenizer) -> TaskSource:
    """The source called `name`, or with `auto` the first that accepts the tokenizer.

    Raises:
        InputError: no such source, or none that accepts the tokenizer.
    """
    sources = task_sources()
    if name != "auto":
        if name not in sources:
            raise InputError(f"unknown task source {name!r}{did_you_mean(name, sources)}; known: {listed(sources)}")
        return sources[name]
    for source in sources.values():
        if source.accepts(tokenizer):
            return source
    raise InputError(f"no task source fits this tokenizer; known: {listed(sources)}; name one with --source")


def choose_tasks(source: TaskSource, wanted: Sequence[str]) -> tuple[str, ...]:
    """The tasks named, or all of the source for none; InputError for a name it does not have."""
    for task in wanted:
        if task not in source.tasks:
            raise InputError(
                f"task source {source.name!r} has no task {task!r}{did_you_mean(task, source.tasks)}; "
                f"it has {listed(source.tasks)}"
            )
    return tuple(wanted) or source.tasks
