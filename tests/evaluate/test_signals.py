"""What ends an evaluation ends it cleanly, however often it is told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console
from witcert_demo.task_source import NEEDLES

from witcert_core.evaluate.askers import Reply
from witcert_core.evaluate.campaign import Plan, run
from witcert_core.evaluate.records import RecordFile
from witcert_core.evaluate.servers import ending_signals_raised
from witcert_core.evaluate.settings import Mode
from witcert_core.evaluate.tasks import EvalSample


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_during_an_answer_end_the_command_with_its_code(
    sent: signal.Signals, code: int, twin_path: Path, tmp_path: Path
) -> None:
    """Two of them, as a terminal and a batch system send them: an abort in native code ended with 134."""
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program += "; from witcert_core.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "eval", "ruler", "--model", str(twin_path), "--quantizers", "kivi"]
    command += ["--lengths", "1024", "--samples", "500", "--tasks", "multi_key", "--modes", "raw", "--no-plot"]
    log = tmp_path / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen([*command, "--out", str(tmp_path)], stdout=sink, stderr=subprocess.STDOUT)
    records = tmp_path / "samples.jsonl"
    while process.poll() is None and not (records.exists() and records.stat().st_size):
        time.sleep(0.05)
    process.send_signal(sent)
    process.send_signal(sent)
    assert process.wait(120) == code, log.read_text()
    said = log.read_text()
    assert "terminate" not in said
    assert "Traceback" not in said


class Slow:
    """A server that answers nothing before it is stopped; the first question ends the run, twice."""

    quantizer = "q"
    mode: Mode = "raw"
    engine = "slow"
    settings: ClassVar[Mapping[str, Any]] = {}
    parallel = 3

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.asked = 0

    def open(self) -> None:
        pass

    def ask(self, sample: EvalSample, request_id: str) -> Reply:
        self.asked += 1
        if self.asked == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            self.stopped.wait(30)
            os.kill(os.getpid(), signal.SIGTERM)  # the main thread waits for these threads now
        self.stopped.wait(30)
        time.sleep(0.2)
        return Reply("", None)

    def close(self) -> None:
        self.stopped.set()


def test_no_thread_outlives_a_run_that_is_ended_while_servers_are_asked(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    asker = Slow()
    plan = Plan(NEEDLES, ("multi_key",), (128,), 9, 0)
    with ending_signals_raised(), pytest.raises(SystemExit) as ended:
        run(plan, [asker], None, RecordFile(tmp_path, {}), Console(file=StringIO()))  # type: ignore[list-item, arg-type]
    assert ended.value.code == 143
    assert asker.asked <= asker.parallel
    assert set(threading.enumerate()) <= before
