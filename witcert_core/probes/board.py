"""The answers of all probes, in the process that reports: what was measured of the rows they took, cell by cell.

Probes read deterministic bounds. These hold whatever was asked and whatever was seen before, so a probe that somebody
enables after an answer of another claims no less.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from witcert_core.meter.cells import CellBatch
from witcert_core.probes.answers import Answer, Cell, Group
from witcert_core.probes.fields import CELL_KEYS, FIELDS, STATUSES, Value, measures
from witcert_core.probes.language import Probe, parse_probe
from witcert_core.probes.predicate import Decided
from witcert_core.probes.watches import Command

PROBE_SCHEMA = "witcert.probe/1"
MAX_ENDED = 64
"""Answers of ended probes that are kept; the oldest go first."""


@dataclass
class Asked:
    """One probe and its answer so far. rows: that it took and whose tokens were committed; ended: why, '' before."""

    probe: Probe
    answer: Answer
    rows: int = 0
    matched: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    ended: str = ""


class ProbeBoard:
    """num_qo_heads: H, of all ranks; the first has the id head_offset."""

    def __init__(self, num_qo_heads: int, head_offset: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._heads = torch.arange(head_offset, head_offset + num_qo_heads)
        self._clock = clock
        self._asked: dict[str, Asked] = {}

    def command(self, command: Command) -> None:
        """Enable a probe, end it, or forget its answer."""
        name = command["id"]
        if command["do"] == "enable":
            probe = parse_probe(command["text"])
            self._asked[name] = Asked(probe, Answer(probe.aggregate, probe.by))
        elif command["do"] == "end":
            self.end(name, command["text"])
        else:
            self._asked.pop(name, None)

    def end(self, name: str, why: str) -> None:
        """The probe takes no more rows; its answer stays."""
        if name in self._asked and not self._asked[name].ended:
            self._asked[name].ended = why
        ended = [other for other, asked in self._asked.items() if asked.ended]
        for oldest in ended[: max(len(ended) - MAX_ENDED, 0)]:
            del self._asked[oldest]

    def observe(
        self,
        names: Iterable[str],
        facts: Mapping[str, Value],
        layers: Mapping[int, tuple[CellBatch, int]],
        unknown: Mapping[int, str],
    ) -> float:
        """One row that was taken for the probes `names`.

        facts: of its request and itself, step and position included. layers: layer -> the batch of its deterministic
        bounds and its place there. unknown: the other layers, with the reason. Returns the seconds this took.
        """
        first = self._clock()
        asked = [self._asked[name] for name in names if name in self._asked]
        read = {layer: measures(*found) for layer, found in layers.items()} if asked else {}
        for one in asked:
            before = self._clock()
            one.rows += 1
            for layer, found in read.items():
                self._measured(one, {**facts, "layer": layer, "head": self._heads, **found})
            for layer, reason in unknown.items():
                self._unknown(one, {**facts, "layer": layer, "head": self._heads}, reason)
            one.seconds += self._clock() - before
        return self._clock() - first

    def shown(self) -> list[dict[str, Any]]:
        """Every probe with its answer (schema witcert.probe/1), the latest last."""
        return [
            {
                "schema": PROBE_SCHEMA,
                "id": name,
                "probe": asked.probe.text,
                "ended": asked.ended or None,
                "limits": {
                    "rows": asked.probe.rows,
                    "seconds": asked.probe.seconds,
                    "share_of_passes": asked.probe.share,
                    "every": asked.probe.every,
                },
                "rows": asked.rows,
                "cells": {status: asked.matched[status] for status in STATUSES if status != "unknown"},
                "unknown": dict(asked.unknown),
                "seconds_spent": asked.seconds,
                **asked.answer.as_dict(),
            }
            for name, asked in self._asked.items()
        ]

    def _measured(self, one: Asked, facts: Mapping[str, Value]) -> None:
        matched = self._mask(one.probe.condition.decide(facts).is_true)
        status = torch.as_tensor(facts["status"])
        if not self._asks_status(one.probe):
            matched = matched & (status == STATUSES.index("measured"))
        for number in (0, 1):
            one.matched[STATUSES[number]] += int((matched & (status == number)).sum())
        self._add(one, facts, matched)

    def _unknown(self, one: Asked, facts: Mapping[str, Value], reason: str) -> None:
        decided: Decided = one.probe.condition.decide({**facts, "status": STATUSES.index("unknown")})
        one.unknown[reason] += int(self._mask(decided.may).sum())
        if self._asks_status(one.probe):
            status = torch.full_like(self._heads, STATUSES.index("unknown"))
            self._add(one, {**facts, "status": status}, self._mask(decided.is_true))

    def _add(self, one: Asked, facts: Mapping[str, Value], matched: torch.Tensor) -> None:
        heads = matched.nonzero().flatten().tolist()
        if not heads:
            return
        probe, answer = one.probe, one.answer
        of_measure = facts.get(probe.aggregate.measure)
        values: list[float] = [] if of_measure is None else torch.as_tensor(of_measure).tolist()
        groups: dict[Group, list[int]] = {}
        apart = any(key in CELL_KEYS for key in probe.by)
        for head in heads if apart else heads[:1]:
            groups.setdefault(tuple(_key(facts, key, head) for key in probe.by), []).append(head)
        for group, members in groups.items():
            members = members if apart else heads
            known = [values[head] for head in members if values and values[head] == values[head]]
            answer.add(group, known, len(members))
        if values and max((x for x in values if x == x), default=-torch.inf) > answer.floor():
            for head in heads:
                if values[head] > answer.floor():
                    answer.keep(values[head], _cell(facts, head))

    def _mask(self, decided: bool | torch.Tensor) -> torch.Tensor:
        """Bool [H]."""
        if isinstance(decided, torch.Tensor):
            return decided
        return torch.full_like(self._heads, decided, dtype=torch.bool)

    @staticmethod
    def _asks_status(probe: Probe) -> bool:
        """A probe that names the status chooses it; any other asks of measured cells."""
        return "status" in probe.names


def _key(facts: Mapping[str, Value], name: str, head: int) -> str | int | float:
    """The value of a group's key, of the cell of one head; "none" where there is none."""
    found = facts.get(name)
    if isinstance(found, torch.Tensor):
        found = found[head].item()
        found = "none" if found != found else int(found)
    if found is None:
        return "none"
    words = FIELDS[name].words
    return words[int(found)] if words and not isinstance(found, str) else found


def _cell(facts: Mapping[str, Value], head: int) -> Cell:
    return {name: _key(facts, name, head) for name in ("request", "layer", "head", "step", "position", "form")}
