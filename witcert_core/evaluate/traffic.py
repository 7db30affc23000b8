"""Traffic as a server or its gateway writes it down: lines of a growing file, and which of them are taken.

A line is a JSON object (`Line`), or one that SGLang writes about a finished request under `--log-requests-format json`,
with the time in brackets before it. Nothing here keeps more than one line and a block that is being read.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from witcert_core.errors import InputError
from witcert_core.evaluate.meter_run import prompt_of
from witcert_core.evaluate.offline.model import Prompt

LONGEST_LINE = 4 * 2**20
"""Bytes of a line; what is longer is passed over, and counted."""
_BLOCK = 2**18
CACHE_KEYS = ("cache_salt", "extra_key")
"""Of a line: whose cached prefixes the request was served from."""


class Ids(list[int]):
    """Token ids, told from the messages of a chat."""


class LineError(InputError):
    """A line that says nothing of a request; `reason` is one of few words, for a counter."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Line:
    """A request that was served.

    prompt: a text, messages of a chat, or token ids. text: what was answered, as text or token ids, None if the line
    does not say. cache: by `CACHE_KEYS`.
    """

    prompt: Prompt | Ids
    text: str | Ids | None = None
    request_id: str = ""
    cache: Mapping[str, str] = field(default_factory=dict)


def parse_line(raw: bytes) -> Line | None:
    """The request of a line; None for lines of a server's log that are about something else.

    Raises:
        LineError: neither, and what is wrong with it.
    """
    text = raw.decode(errors="replace")
    logged = text.startswith("[")  # SGLang's: `[2026-01-31 12:00:00] {...}`
    begin = text.find("{") if logged else 0
    if logged and not text[begin:].startswith('{"timestamp"'):
        return None
    try:
        data = json.loads(text[begin:])
    except ValueError as error:
        raise LineError("not_json", f"is not JSON: {error}") from error
    if logged:
        return _sglang(data)
    prompt = _ids(data, "prompt") or prompt_of(data)
    if prompt is None:
        why = 'has no text (or token ids) under "prompt", nor texts under "role" and "content" of each of "messages"'
        raise LineError("no_prompt", why)
    return Line(prompt, _answer(data), _word(data, "id"), {key: data[key] for key in CACHE_KEYS if _word(data, key)})


def _sglang(data: Mapping[str, Any]) -> Line | None:
    """Of a finished request, which SGLang logs with all it was asked and answered at level 3."""
    if data.get("event") != "request.finished":
        return None
    asked, out = data.get("obj"), data.get("out")
    if not isinstance(asked, dict) or not isinstance(out, dict) or "output_ids" not in out:
        raise LineError("no_prompt", "SGLang logged no prompt and answer; start it with --log-requests-level 3")
    media = [key for key in ("image_data", "audio_data", "video_data", "input_embeds") if asked.get(key)]
    if media or asked.get("lora_path"):
        raise LineError("not_text", f"was asked with {(media or ['lora_path'])[0]}, which is not asked again")
    prompt, text = _ids(asked, "input_ids") or asked.get("text"), _ids(out, "output_ids")
    if not isinstance(prompt, list | str) or text is None:
        raise LineError("no_prompt", "SGLang logged no whole prompt and answer; start it with --log-requests-level 3")
    return Line(prompt, text, _word(data, "rid"), {key: asked[key] for key in CACHE_KEYS if _word(asked, key)})


def _ids(data: object, key: str) -> Ids | None:
    """Token ids; None where there is anything else, or a log that was cut."""
    found = data.get(key) if isinstance(data, dict) else None
    if not isinstance(found, list) or not found or not all(type(token) is int and token >= 0 for token in found):
        return None
    return Ids(found)


def _answer(data: Mapping[str, Any]) -> str | Ids | None:
    text = data.get("text")
    if text is None or isinstance(text, str):
        return text
    ids = _ids(data, "text")
    if ids is None:
        raise LineError("bad_text", '"text" is neither a text nor token ids')
    return ids


def _word(data: Mapping[str, Any], key: str) -> str:
    """A text, empty where there is none."""
    found = data.get(key)
    if found is None:
        return ""
    if not isinstance(found, str):
        raise LineError("bad_" + key, f'"{key}" is no text')
    return found


class Follower:
    """Lines that are appended to a file from now on, as `tail -F` has them: also of a new file in its place.

    Raises:
        InputError: a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.too_long = 0
        self._rest = b""
        self._skipping = False
        self._file = self._open()
        self._file.seek(0, os.SEEK_END)

    def _open(self) -> Any:
        try:
            return self.path.open("rb", buffering=0)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {error.strerror}; name a file of traffic") from error

    def close(self) -> None:
        self._file.close()

    def lines(self) -> Iterator[bytes]:
        """Every whole line that is there by now."""
        while True:
            if block := self._file.read(_BLOCK):
                yield from self._cut(block)
            elif not self._renewed():
                return

    def _cut(self, block: bytes) -> Iterator[bytes]:
        *whole, rest = (self._rest + block).split(b"\n")
        for line in whole:
            if not self._skipping and line.strip():
                yield line
            self._skipping = False
        if len(rest) > LONGEST_LINE or self._skipping:
            self.too_long += not self._skipping
            self._skipping, rest = True, b""
        self._rest = rest

    def _renewed(self) -> bool:
        """Whether the file was cut or another one stands in its place, which is then read from its beginning."""
        try:
            there = self.path.stat()
        except FileNotFoundError:
            return False  # between two files
        here = os.fstat(self._file.fileno())
        if (there.st_ino, there.st_dev) == (here.st_ino, here.st_dev) and there.st_size >= self._file.tell():
            return False
        self._file.close()
        self._file, self._rest, self._skipping = self._open(), b"", False
        return True


class Draw:
    """One of every n lines, each as likely as the others, where 1 / n is at most `share`.

    It is known when n lines have come, so that at no moment more than the share of them was taken.
    """

    def __init__(self, share: float, seed: int | None = None) -> None:
        if not 0 < share <= 1:
            raise InputError(f"share is {share}; it must be above 0 and at most 1")
        self.every = every_of(share)
        self._random = random.Random(seed)
        self._seen = 0
        self._kept: Line | None = None

    def offer(self, line: Line) -> Line | None:
        """The line that is taken of the last n, when the last of them is offered."""
        self._seen += 1
        if self._random.random() * self._seen < 1:  # each of the first k is kept with probability 1 / k
            self._kept = line
        if self._seen < self.every:
            return None
        self._seen, taken, self._kept = 0, self._kept, None
        return taken


def every_of(share: float) -> int:
    """The smallest n with 1 / n at most share."""
    every = max(1, round(1 / share))
    return every if every * share >= 1 else every + 1
