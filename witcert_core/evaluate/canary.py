"""`witcert canary`: a sidecar that scores a share of a running server's traffic by exact keys. Measured, not bounded.

A request that is drawn is answered again, greedily, from the quantized cache, and what was written is scored where it
reads exact keys (`drift_served.py`). If the answer that was served is another one it is scored there, too.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import start_http_server

from witcert_core.errors import InputError, ReportError, UnsupportedError, WitCertError
from witcert_core.evaluate.askers import UnreachableError, UrlAsker
from witcert_core.evaluate.canary_metrics import CanaryMetrics
from witcert_core.evaluate.drift_served import Scored, Sglang, Vllm, check_exact, compare_likeliest, engine_of
from witcert_core.evaluate.offline.model import load_tokenizer, prompt_ids, text_ids
from witcert_core.evaluate.records import meter_of
from witcert_core.evaluate.servers import ending_signals_raised
from witcert_core.evaluate.traffic import Draw, Follower, Ids, Line, LineError, parse_line
from witcert_core.report.jsonl import JsonlWriter

SCHEMA = "witcert.canary/1"
OWN = "witcert-canary-"
"""What the ids of the canary's own requests begin with, by which it knows them in a server's log."""
PENDING = 8
"""Requests that wait to be scored; the oldest give way."""
NAP_S = 0.2
LONGEST_WAIT_S = 30.0


@dataclass(frozen=True)
class CanaryRun:
    """What `witcert canary` was asked to do.

    model: its tokenizer, None is what the server names. tokens: written and scored of a request, at most.
    longest: tokens of a prompt, beyond which a request is left out. per_minute: requests that are scored, at most.
    """

    url: str
    traffic: Path
    out: Path
    share: float
    host: str
    port: int
    model: str | None
    chat: bool
    tokens: int
    longest: int
    per_minute: float
    seed: int | None = None


class LeftOutError(WitCertError):
    """A request that cannot be scored; `reason` is one of few words."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass
class Scorer:
    """A server that answers, and the tokenizer of its model."""

    server: UrlAsker
    engine: Sglang | Vllm
    tokenizer: Any
    run: CanaryRun

    def score(self, line: Line) -> dict[str, Any]:
        """A record of schema witcert.canary/1, which holds no text.

        Raises:
            LeftOutError: a request that cannot be scored.
            UnreachableError: the server is away.
        """
        if strange := sorted(line.cache.keys() - set(self.engine.cache_keys)):
            raise LeftOutError("cache", f"a request with {strange[0]}, which {self.server.owner} does not know")
        prompt, served = self._tokens(line)
        room = self.run.tokens if served is None else max(2, min(self.run.tokens, len(served)))
        served = None if served is None else served[: self.run.tokens]
        name = f"request {line.request_id or 'without an id'}"
        begun = time.time()
        try:
            written = self.engine.write(prompt, room, name, **line.cache)
            if len(written.ids) < 2:
                raise LeftOutError("too_short", f"{name}: its answer ends at its first token, which reads exact keys")
            exact = self._exact(prompt, written.ids, name)
            same = served is None or list(written.ids[: len(served)]) == served
            own = exact if same or served is None or len(served) < 2 else self._exact(prompt, served, name)
        except UnsupportedError as error:
            raise LeftOutError("refused", str(error)) from error
        drift = compare_likeliest(exact, written)
        return {
            "schema": SCHEMA,
            "time": round(begun, 3),
            "request_id": line.request_id,
            "quantizer": written.summary["quantizer"],
            "drift": {**drift, "exact_nll": exact.nll, "nll_increase": drift["nll"] - exact.nll},
            "served": None if served is None or len(served) < 2 else {"same": same, **_by_exact_keys(own, len(served))},
            "meter": meter_of(written.summary),
        }

    def _tokens(self, line: Line) -> tuple[list[int], list[int] | None]:
        """Prompt and served answer; text is cut into tokens again, which may not be how it was generated."""
        try:
            prompt = (
                line.prompt
                if isinstance(line.prompt, Ids)
                else prompt_ids(self.tokenizer, line.prompt, self.server.model, chat=self.run.chat)
            )
        except InputError as error:
            raise LeftOutError("no_tokens", str(error)) from error
        if not 0 < len(prompt) <= self.run.longest:
            raise LeftOutError("too_long" if prompt else "no_tokens", f"a prompt of {len(prompt)} tokens")
        text = line.text
        return prompt, text_ids(self.tokenizer, text) if isinstance(text, str) else text

    def _exact(self, prompt: Sequence[int], answer: Sequence[int], name: str) -> Scored:
        found = self.engine.score(prompt, answer, f"the answer to {name}")
        check_exact(found.summary, self.server.url, len(prompt) + len(answer))
        return found


def _by_exact_keys(found: Scored, tokens: int) -> dict[str, Any]:
    """Of the first `tokens` tokens of an answer that was scored: how likely they are, and where one is not the
    likeliest, which in a text that was drawn at a temperature says nothing."""
    ids, laws = found.ids[:tokens], found.laws[:tokens]
    likeliest = [max(law, key=law.__getitem__) == token for law, token in zip(laws, ids, strict=True)]
    return {
        "tokens": len(ids),
        "nll": Scored(ids, laws, found.summary).nll,
        "likeliest": sum(likeliest) / len(likeliest),
        "first_other": likeliest.index(False) if False in likeliest else None,
    }


def connect(wanted: CanaryRun) -> Scorer:
    """UnreachableError while the server is away, UnsupportedError where it cannot score by exact keys."""
    server = UrlAsker(wanted.url)
    try:
        engine = engine_of(server, OWN)
        return Scorer(server, engine, load_tokenizer(wanted.model or server.model_path), wanted)
    except WitCertError:
        server.close()
        raise


@dataclass
class Canary:
    """One canary; `turn` reads what has come and scores at most one request."""

    wanted: CanaryRun
    say: Callable[[str], object]
    metrics: CanaryMetrics = field(default_factory=CanaryMetrics)

    def __post_init__(self) -> None:
        self._draw = Draw(self.wanted.share, self.wanted.seed)
        self._follower = Follower(self.wanted.traffic)
        self._writer = JsonlWriter(self.wanted.out)
        self._pending: deque[Line] = deque()
        self._scorer: Scorer | None = None
        self._not_before = 0.0
        self._wait_s = 1.0
        self._named: set[str] = set()

    def close(self) -> None:
        """Give everything back."""
        if self._scorer is not None:
            self._scorer.server.close()
        self._follower.close()
        self._writer.close()

    def turn(self) -> None:
        """Raises UnsupportedError where the server that is there cannot score by exact keys."""
        self._read()
        if time.monotonic() < self._not_before:
            return
        if self._scorer is None:
            self._scorer = self._connected()
        elif self._pending:
            line = self._pending.popleft()
            self._not_before = time.monotonic() + 60.0 / self.wanted.per_minute
            try:
                self._write(self._scorer.score(line))
            except LeftOutError as error:
                self.metrics.left_out.labels(error.reason).inc()
                self._name_once(error.reason, str(error))
            except UnreachableError as error:
                self._pending.appendleft(line)
                self._away(error)

    def _read(self) -> None:
        for raw in self._follower.lines():
            try:
                line = parse_line(raw)
            except LineError as error:
                self.metrics.malformed.labels(error.reason).inc()
                self._name_once(error.reason, f"{self.wanted.traffic}: a line of {len(raw)} bytes {error}")
                continue
            if line is None or line.request_id.startswith(OWN):
                continue
            self.metrics.seen.inc()
            if taken := self._draw.offer(line):
                self.metrics.taken.inc()
                self._pending.append(taken)
        while len(self._pending) > PENDING:
            self._pending.popleft()
            self.metrics.left_out.labels("overtaken").inc()
        if self._follower.too_long:
            self.metrics.malformed.labels("too_long").inc(self._follower.too_long)
            self._name_once("line_too_long", f"{self.wanted.traffic}: a line is longer than is read")
            self._follower.too_long = 0

    def _connected(self) -> Scorer | None:
        try:
            scorer = connect(self.wanted)
        except UnreachableError as error:
            self._away(error)
            return None
        self._wait_s = 1.0
        self.metrics.up.set(1)
        self.say(f"{self.wanted.url} answers; quantizer {scorer.server.quantizer}")
        return scorer

    def _away(self, error: UnreachableError) -> None:
        """Ask again later; what the server is may have changed by then."""
        if self._scorer is not None or self._wait_s == 1.0:
            self.say(f"{error}; asked again until it answers")
        if self._scorer is not None:
            self._scorer.server.close()
            self._scorer = None
        self.metrics.up.set(0)
        self._not_before = time.monotonic() + self._wait_s
        self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)

    def _write(self, record: dict[str, Any]) -> None:
        self._writer.write(record)
        if self._writer.dropped:
            raise ReportError(f"{self._writer.path}: a record could not be written; is the disk full?")
        self.metrics.scored(record)

    def _name_once(self, reason: str, detail: str) -> None:
        """The first of each kind is named; all are counted."""
        if reason not in self._named:
            self._named.add(reason)
            self.say(f"{detail} (further ones are counted as {reason})")


def run(wanted: CanaryRun) -> None:
    """Until a signal ends it (SystemExit, KeyboardInterrupt)."""

    def say(text: str) -> None:
        print(f"witcert canary: {text}", file=sys.stderr, flush=True)

    with ending_signals_raised():
        canary = Canary(wanted, say)
        try:
            server, thread = _serve(wanted, canary.metrics)
            try:
                say(
                    f"takes one of {canary._draw.every} requests; metrics at http://{wanted.host}:{wanted.port}/metrics"
                )
                while True:
                    canary.turn()
                    time.sleep(NAP_S)
            finally:
                server.shutdown()
                server.server_close()
                thread.join()
        finally:
            canary.close()


def _serve(wanted: CanaryRun, metrics: CanaryMetrics) -> tuple[Any, Any]:
    try:
        return start_http_server(wanted.port, wanted.host, metrics.registry)
    except OSError as error:
        raise InputError(
            f"{wanted.host}:{wanted.port}: no metrics can be served there: {error.strerror}; choose another --port"
        ) from error
