"""One JSON line a sample: what was asked, what came back, what the meter saw. A run that stops goes on where it was."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from witcert_core.errors import InputError, ReportError
from witcert_core.report.jsonl import JsonlWriter

SCHEMA = "witcert.sample/2"
Key = tuple[str, str, str, int, int]


@dataclass(frozen=True)
class SampleRecord:
    """One answered sample. meter: `meter_of` its summary, None where the server is not metered."""

    quantizer: str
    mode: str
    task: str
    num_tokens: int
    index: int
    score: float
    answer: str
    expected: list[str]
    engine: str
    seconds: float
    meter: dict[str, Any] | None

    @property
    def key(self) -> Key:
        return self.quantizer, self.mode, self.task, self.num_tokens, self.index

    @property
    def sample(self) -> tuple[str, int, int]:
        """What was asked, whoever answered."""
        return self.task, self.num_tokens, self.index


def meter_of(summary: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What is kept of a summary (schema witcert.request/1)."""
    if summary is None:
        return None
    counts = ("tier", "tau", "cells_measured", "cells_exact", "cells_unknown", "tv_certified_cells", "damaged_cells")
    kept = {name: summary[name] for name in counts}
    beside = summary["deterministic_beside"]
    return {
        **kept,
        "tv_certified_any_query": (kept if beside is None else beside)["tv_certified_cells"],
        "worst": None if summary["worst"] is None else summary["worst"]["meter"],
        "log_a_max": summary["log_a_max"],
        "audited": summary["audit"]["cells"],
        "violations": summary["audit"]["violations"],
        "mismatches": summary["audit"]["mismatches"],
        "tv_max": summary["audit"]["tv_max"],
        "repaired_blocks": summary["gate"]["repaired_blocks"],
        "repaired_bytes": summary["gate"]["bytes"],
        "gate_within_target": summary["gate"]["within_target"],
        "gate_above_target": summary["gate"]["above_target"],
        "gate_ranked": summary["gate"]["ranked"],
    }


def number(value: float | str | None) -> float:
    """A reported number; "inf" and None (nothing known) are infinite."""
    return math.inf if value is None or value == "inf" else float(value)


class RecordFile:
    """The records of a run. `about` says what they have in common; records of another run are not mixed in."""

    def __init__(self, directory: Path, about: Mapping[str, Any]) -> None:
        self.path = directory / "samples.jsonl"
        self._settings = directory / "settings.json"
        make_directory(directory)
        _same_run(directory / "run.json", dict(about))
        _end_torn_line(self.path)
        self.records = read_records(self.path)
        self._done = {record.key for record in self.records}
        self._writer = JsonlWriter(self.path)

    def claim(self, quantizer: str, mode: str, settings: Mapping[str, Any]) -> None:
        """Say what the answers of one quantizer and mode depend on; InputError where those here depend on other things.

        Without this a sample asked under another policy or in another engine would be taken for the one wanted.
        """
        known = _read_mapping(self._settings) if self._settings.exists() else {}
        name = f"{quantizer} {mode}"
        found, wanted = _flat(known.get(name, settings)), _flat(json.loads(json.dumps(settings)))
        for key in sorted({*found, *wanted}):
            if found.get(key) != wanted.get(key):
                raise InputError(
                    f"{self.path.parent} holds samples of {name} with {key} {found.get(key)!r}, this run has "
                    f"{wanted.get(key)!r}; choose another --out"
                )
        write_json(self._settings, {**known, name: settings})

    def has(self, key: Key) -> bool:
        return key in self._done

    def add(self, record: SampleRecord) -> None:
        """Write a record down; ReportError if it cannot be."""
        self._writer.write({"schema": SCHEMA, **asdict(record)})
        if self._writer.dropped:
            raise ReportError(f"{self.path}: a record could not be written")
        self.records.append(record)
        self._done.add(record.key)

    def close(self) -> None:
        self._writer.close()


def make_directory(path: Path) -> None:
    """ReportError where it cannot be made, or is no directory, or cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ReportError(f"{path}: results cannot be written there: {error.strerror}") from error


def read_records(path: Path) -> list[SampleRecord]:
    """All records of a file, none where it does not exist; ReportError for a line that is not one."""
    if not path.exists():
        return []
    names = {field.name for field in fields(SampleRecord)}
    records = []
    for number_of_line, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise ReportError(f"{path}, line {number_of_line}: is not JSON: {error}; remove the line") from error
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA or set(data) != names:
            raise ReportError(f"{path}, line {number_of_line}: is no record of schema {SCHEMA}; remove the line")
        records.append(SampleRecord(**data))
    return records


def write_json(path: Path, data: Mapping[str, Any] | Sequence[Any]) -> None:
    """Indented JSON that ends with a line break; strict, so infinities must already be words."""
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _same_run(path: Path, about: dict[str, Any]) -> None:
    if not path.exists():
        write_json(path, about)
        return
    known = _read_mapping(path)
    differing = [key for key in sorted({*known, *about}) if known.get(key) != about.get(key)]
    if differing:
        key = differing[0]
        raise InputError(
            f"{path.parent} holds a run with {key} {known.get(key)!r}, this one has {about.get(key)!r}; "
            "choose another --out"
        )


def _read_mapping(path: Path) -> dict[str, Any]:
    """ReportError for what a run did not leave so."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReportError(f"{path}: is not JSON: {error}; restore it or choose another --out") from error
    if not isinstance(known, dict):
        raise ReportError(f"{path}: holds no mapping; restore it or choose another --out")
    return known


def _end_torn_line(path: Path) -> None:
    """A process that was killed may have left half a line; that sample is asked again."""
    if not path.exists():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        path.write_bytes(data[: data.rfind(b"\n") + 1])
