"""Append-only JSON lines: one object a line, on disk when `write` returns."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from witcert_core.errors import ReportError

logger = logging.getLogger(__name__)


class JsonlWriter:
    """One writer per process; `{pid}` in the path becomes the process id.

    A line goes out in one write to a file opened for appending; processes that share it do not mix lines.
    The file is opened at once: a path that cannot be written is a ReportError at start, not at midnight.
    A line lost later (disk full) must not stop serving: it is logged once and counted in `dropped`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(str(path).replace("{pid}", str(os.getpid())))
        self.dropped = 0
        self._torn = False
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise ReportError(
                f"report.jsonl: {self.path} cannot be opened for appending: {error.strerror}; "
                "create its directory or change the path"
            ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; strict JSON, so infinities must already be words."""
        line = (json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n").encode()
        if self._torn:  # end what is left of a line that did not fit, so that it spoils no other
            line = b"\n" + line
        try:
            written = os.write(self._file, line)
        except OSError as error:
            self._drop(error.strerror)
            return
        self._torn = written != len(line)
        if self._torn:
            self._drop(f"{written} of {len(line)} bytes fitted")

    def close(self) -> None:
        os.close(self._file)

    def _drop(self, why: str | None) -> None:
        if self.dropped == 0:
            logger.error("report.jsonl: a record for %s was lost (%s); later losses are only counted", self.path, why)
        self.dropped += 1


def check_writable(path: str) -> None:
    """ReportError if records could not be appended to `path`. Asked by processes that will write none.

    A file named after this process is taken away again, or it would lie there empty.
    """
    writer = JsonlWriter(path)
    writer.close()
    if writer.path != Path(path) and writer.path.stat().st_size == 0:
        writer.path.unlink()
