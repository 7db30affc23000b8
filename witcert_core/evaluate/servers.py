"""Start a server in a process group of its own, wait until it is healthy, and leave nothing of it behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from witcert_core.errors import WitCertError
from witcert_core.evaluate.extras import require

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 20.0
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The end of a traceback, bare or behind a logger's "(Worker pid=1) ERROR 11-30 06:51:15 [file.py:1] ".
_RAISED = re.compile(r"^(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?((?:\w+\.)*\w*(?:Error|Exception|Exit): .*\S)")


class ServerError(WitCertError, RuntimeError):
    """The server did not start; the message is the last line that says why, and where the log is."""


@dataclass(frozen=True)
class Server:
    """A running server: its address, its process (leader of its own group), its log file, and the key it asks for."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    key: str | None = None

    def client(self) -> Any:
        """An httpx.Client for its address, with its key."""
        return require("httpx").Client(base_url=self.url, timeout=120.0, headers=bearer(self.key))

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")


def bearer(key: str | None) -> dict[str, str]:
    """The header that carries a server's key (`--api-key`), none without one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def free_port() -> int:
    """A port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(
    command: Sequence[str],
    port: int,
    *,
    env: Mapping[str, str],
    log: Path,
    waiting: Callable[[float], None] = lambda _seconds: None,
    timeout_s: float = START_TIMEOUT_S,
) -> Iterator[Server]:
    """A healthy server for the length of the block; every process it started is gone afterwards.

    command: must make it listen on `port` of 127.0.0.1. waiting: called with the seconds waited so far while the
    server starts. Raises ServerError if it does not start.
    """
    process: subprocess.Popen[bytes] | None = None
    try:
        # A signal between the fork and the assignment would leave a server that nobody stops.
        with log.open("wb") as sink, held_signals():
            process = subprocess.Popen(
                list(command),
                env=dict(env),
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        server = Server(f"http://127.0.0.1:{port}", process, log)
        wait_until_healthy(server, waiting, timeout_s)
        yield server
    finally:
        if process is not None:
            stop(process)


@contextmanager
def held_signals() -> Iterator[None]:
    """Signals that end this process wait until the block is left. In threads, which get none, nothing is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = {number: signal.signal(number, lambda n, _frame: arrived.append(n)) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])


@contextmanager
def ending_signals_raised() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit in the block, as Ctrl-C raises KeyboardInterrupt, instead of ending us."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in ENDING if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_until_healthy(server: Server, waiting: Callable[[float], None], timeout_s: float = START_TIMEOUT_S) -> None:
    """Return once `/health` answers; ServerError when the process ends or the time is up."""
    httpx = require("httpx")
    begun = time.monotonic()
    while (waited := time.monotonic() - begun) < timeout_s:
        if server.process.poll() is not None:
            raise ServerError(f"the server ended with code {server.process.returncode}: {last_words(server)}")
        try:
            if httpx.get(f"{server.url}/health", timeout=2.0).status_code == 200:
                return
        except httpx.TransportError:
            pass
        waiting(waited)
        time.sleep(0.5)
    raise ServerError(f"the server did not answer within {timeout_s:.0f} s: {last_words(server)}")


def last_words(server: Server) -> str:
    """The line of the log that says most about a failed start, and where the log is.

    Ours if we refused. Otherwise the first exception: an engine whose worker died ends with one that says just that.
    """
    lines = [line.strip() for line in server.log_text().splitlines() if line.strip()]
    ours = [line[line.index("witcert: ") :] for line in lines if _refusal(line)]
    raised = [match[1] for match in map(_RAISED.match, lines) if match]
    return f"{(ours[-1:] or raised[:1] or lines[-1:] or ['no output'])[0]} (log: {server.log})"


def _refusal(line: str) -> bool:
    """A line of ours, bare or behind the name of the engine's process."""
    return re.match(r"(?:\([^)]*\) )?witcert: ", line) is not None


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the process group of `process`: first asked, then killed; returns when all of it is gone.

    A second Ctrl-C must not interrupt this, or servers would be left behind.
    """
    with held_signals():
        stop_group(process)


def stop_group(process: subprocess.Popen[bytes]) -> None:
    """Ask, wait, kill, wait."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sig)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline and group_alive(process):
            time.sleep(0.1)
        if not group_alive(process):
            break
    process.wait()


def group_alive(process: subprocess.Popen[bytes]) -> bool:
    """Whether any process of the group is left (the leader is reaped on the way)."""
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True
