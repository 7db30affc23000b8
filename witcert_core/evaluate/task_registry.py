"""Tasks by name: those built in and those that entry points add."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint

from witcert_core.errors import InputError, PluginError, did_you_mean, listed
from witcert_core.evaluate.tasks import TaskSource, TextTokenizer
from witcert_core.policy import entry_points


def task_sources(found: Sequence[EntryPoint] | None = None) -> dict[str, TaskSource]:
    """All sources by name, this package's own last.

    Raises:
        PluginError: an entry point fails to load, or is no source, or takes a name in use.
    """
    from witcert_core.evaluate.ruler import NATURAL

    sources: dict[str, TaskSource] = {}
    for entry in entry_points.found(entry_points.TASKS) if found is None else found:
        source, where = entry_points.load(entry), entry_points.described(entry)
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
