"""`make demo` as a person runs it, and stopped half-way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.sglang


def hear_ctrl_c() -> None:
    """Tests that a shell runs in the background are deaf to it, and so would be what they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(logs: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    """The demonstration with a mark in its environment, by which its servers are found again."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    env = {**os.environ, "WITCERT_TEST_DEMO": mark}
    command = [sys.executable, "-m", "witcert_demo", "--model", "tiny", "--logs", str(logs), *options]
    process = subprocess.Popen(
        command, env=env, preexec_fn=hear_ctrl_c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return process, mark


def marked(mark: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("WITCERT_TEST_DEMO") == mark]


def test_the_demonstration(tmp_path: Path) -> None:
    process, mark = start(tmp_path, "--per-task", "1", "--svg", str(tmp_path / "demo.svg"))
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert "0 violations" in output
    for name in ("fp8_e4m3_cast", "int4_token_group", "int8_dither"):
        assert f"{name}: " in output
    assert "<svg" in (tmp_path / "demo.svg").read_text()
    assert not marked(mark)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_half_way_it_leaves_no_process(tmp_path: Path, sent: signal.Signals) -> None:
    process, mark = start(tmp_path, "--per-task", "1")
    deadline = time.monotonic() + 60
    while len(marked(mark)) < 2 and time.monotonic() < deadline:  # the demonstration and its first server
        time.sleep(0.2)
    assert len(marked(mark)) >= 2
    process.send_signal(sent)
    if sent == signal.SIGINT:  # an impatient second one must not leave the server behind
        time.sleep(0.4)
        process.send_signal(sent)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert not marked(mark)
