"""Which rows the enabled probes need, decided when a pass is planned: alike on every rank, whatever its clock says.

A rank knows of a pass what the others know. So a probe ends here by counted rows or by a command that all ranks get
between the same two passes, never by the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from witcert_core.probes.fields import PHASES, Value
from witcert_core.probes.language import Probe, parse_probe

ROWS_REACHED = "rows"
"""Why a probe ended that has as many rows as it asked for."""


class Command(TypedDict):
    """What all processes of an engine do between two passes: enable a probe, end it, or forget its answer.

    text: of the probe, or why it ends; '' where it is forgotten.
    """

    do: Literal["enable", "end", "forget"]
    id: str
    text: str


@dataclass
class Watch:
    """An enabled probe: how many more rows it takes, and how many passes went by."""

    probe: Probe
    left: int
    passes: int = 0

    def begin(self) -> bool:
        """Count a pass; whether the probe takes rows of it."""
        before = math.floor(self.passes * self.probe.share)
        self.passes += 1
        return self.left > 0 and math.floor(self.passes * self.probe.share) > before


class Watches:
    """The enabled probes of one rank, by id."""

    def __init__(self) -> None:
        self._watches: dict[str, Watch] = {}
        self._taking: dict[str, Watch] = {}

    def __len__(self) -> int:
        return len(self._watches)

    def command(self, command: Command) -> None:
        """What a probe that has ended or was never enabled here is told to do is done already."""
        if command["do"] == "enable":
            probe = parse_probe(command["text"])
            self._watches[command["id"]] = Watch(probe, probe.rows)
        else:
            self._watches.pop(command["id"], None)

    def begin(self) -> None:
        """A pass is being planned."""
        self._taking = {name: watch for name, watch in self._watches.items() if watch.begin()}

    def generated(self, facts: Mapping[str, Value], number: int) -> tuple[str, ...]:
        """The probes that take a generated row, which is number `number` [0...] of its request."""
        facts = {**facts, "phase": PHASES.index("generated")}
        wanting = [name for name, watch in self._taking.items() if number % watch.probe.every == 0]
        return tuple(name for name in wanting if self._takes(name, facts))

    def of_chunk(self, facts: Mapping[str, Value], prefix: int, new: int, most: int) -> dict[int, tuple[str, ...]]:
        """Offset [0, new) -> probes that take that row of a chunk behind `prefix` tokens: the last, and every n-th
        before it, at most `most`."""
        facts = {**facts, "phase": PHASES.index("prompt")}
        taken: dict[int, tuple[str, ...]] = {}
        for name, watch in self._taking.items():
            for offset in range(new - 1, -1, -watch.probe.every)[:most]:
                if self._takes(name, {**facts, "position": prefix + offset}):
                    taken[offset] = (*taken.get(offset, ()), name)
        return taken

    def ended(self) -> Sequence[str]:
        """The probes that have all their rows, once each."""
        done = [name for name, watch in self._watches.items() if watch.left <= 0]
        for name in done:
            del self._watches[name]
        return done

    def _takes(self, name: str, facts: Mapping[str, Value]) -> bool:
        watch = self._watches[name]
        if watch.left <= 0 or not watch.probe.condition.decide(facts).may:
            return False
        watch.left -= 1
        return True
