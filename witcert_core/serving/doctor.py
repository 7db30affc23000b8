"""What an engine adapter says about itself: findings for `witcert doctor`.

An adapter joins through the entry-point group `witcert.engines`: the name is the engine's, the value a function
`examine(model, policy) -> list[Finding]` whose module can be imported without the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Literal

from witcert_core.policy import entry_points
from witcert_core.serving.hub import unreachable_hub
from witcert_core.serving.startup import refuse_on_error

if TYPE_CHECKING:
    from witcert_core.policy.model import Policy

ADAPTERS = {"sglang": "witcert-sglang", "vllm": "witcert-vllm"}
"""Engine -> the distribution that meters it, installed or not."""


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis. `refused`: a server started like this would not be metered, or would not start."""

    level: Literal["ok", "note", "refused"]
    subject: str
    text: str


def checked(subject: str, check: Callable[..., Any], *args: Any) -> Finding:
    """The finding of one check: what a server at its start would be stopped with, or ok."""
    try:
        refuse_on_error(check, *args)
    except SystemExit as refusal:
        return Finding("refused", subject, str(refusal).removeprefix("witcert: "))
    return Finding("ok", subject, "can be metered")


def verdict(checks: Iterable[tuple[str, Callable[[], Any]]], shown: Sequence[str]) -> list[Finding]:
    """The first refusal among checks by subject, alone; without one, ok for the subjects that are shown."""
    passed = []
    for subject, check in checks:
        finding = checked(subject, check)
        if finding.level == "refused":
            return [finding]
        passed.append(finding)
    return [finding for finding in passed if finding.subject in shown]


def unreadable(path: str, error: Exception) -> Finding:
    """The finding of a directory or hub id that is no model: what Transformers says, or pydantic around it."""
    said = " ".join(str(error).split()).partition(" [type=")[0]
    return Finding("refused", "model", f"{path} cannot be read: {said}")


Examine = Callable[["str | None", "Policy"], list[Finding]]


def installed_engines() -> dict[str, EntryPoint]:
    """Engine -> entry point of the adapter installed for it."""
    return {entry.name: entry for entry in entry_points.found(entry_points.ENGINES)}


def examine(engine: str, model: str | None, policy: Policy) -> list[Finding]:
    """What the adapter of `engine` finds; one refused finding if no adapter is installed.

    Raises PluginError when an installed adapter cannot be imported.
    """
    entry = installed_engines().get(engine)
    if entry is None:
        todo = f"pip install ./adapters/{engine} in a checkout, into the environment of the engine"
        return [Finding("refused", "adapter", f"{ADAPTERS[engine]} is not installed, nothing was examined; {todo}")]
    function: Examine = entry_points.load(entry)
    if model is not None and (unreachable := unreachable_hub(model)):
        return [*function(None, policy), Finding("refused", "model", unreachable)]
    return function(model, policy)
