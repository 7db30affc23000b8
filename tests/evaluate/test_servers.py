"""An evaluation that starts its servers itself, against one that only speaks their routes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from witcert_demo.run import CHECKPOINT

from witcert_core.cli import main
from witcert_core.evaluate import served, servers

FAKE = Path(__file__).parent / "fake_server.py"


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(served.COMMANDS, "sglang", (str(FAKE),))
    monkeypatch.setenv("WITCERT_POLICY", "/nowhere")  # what the caller metered with is not the servers' policy


def command(out: Path, *options: str) -> list[str]:
    common = ["--tasks", "multi_key", "--lengths", "64", "--samples", "5", "--out", str(out), "--no-plot"]
    return ["eval", "ruler", "--model", str(CHECKPOINT), "--engine", "sglang", *common, *options]


def fakes() -> list[psutil.Process]:
    return [p for p in psutil.Process(os.getpid()).children(recursive=True) if str(FAKE) in p.cmdline()]


def test_a_server_for_each_quantizer_and_mode(tmp_path: Path) -> None:
    assert main(command(tmp_path, "--quantizers", "fp8_e4m3_cast,int4_token_group:group_size=16")) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [(row["quantizer"], row["mode"], row["score"]["value"]) for row in rows] == [
        ("none", "exact", 1.0),
        ("fp8_e4m3_cast", "raw", 0.0),
        ("fp8_e4m3_cast", "gated", 1.0),
        ("int4_token_group:group_size=16", "raw", 0.0),
        ("int4_token_group:group_size=16", "gated", 1.0),
    ]
    assert [row["engines"] for row in rows] == [["sglang"]] + [["fake"]] * 4
    assert rows[0]["meter"] is None
    assert rows[2]["repairs"]["bytes_total"] == 1500
    assert not fakes()
    started = len(list(tmp_path.glob("*.log")))
    assert started == 5
    assert main(command(tmp_path, "--quantizers", "fp8_e4m3_cast", "--modes", "raw")) == 0  # all there already


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("dead", "the server ended with code 1: witcert: this one does not start"),
        ("unmetered", "the server says it runs None, not ('fp8_e4m3_cast', 'observe')"),
        ("silent", "is metered but returned no summary"),
        ("refusing", 'was refused with 500: {"message": "no room"}'),
    ],
)
def test_a_server_that_fails_is_one_line_and_no_process(
    how: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--quantizers", "fp8_e4m3_cast", "--modes", "raw", "--server-options", f"--broken {how}"]
    assert main(command(tmp_path, *options)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line
    assert not fakes()


def test_summaries_are_found_where_vllm_puts_them(tmp_path: Path) -> None:
    options = ["--quantizers", "fp8_e4m3_cast", "--modes", "gated", "--server-options", "--place kv_transfer_params"]
    assert main(command(tmp_path, *options)) == 0
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert row["meter"]["cells_measured"] == 50


LOGS = {
    "(EngineCore pid=4) witcert: no meter for this": """
(EngineCore pid=4) ERROR 11-30 06:51:15 [core.py:1] ValueError: something that came first
(EngineCore pid=4) witcert: no meter for this
RuntimeError: Engine core initialization failed.""",
    "ValueError: 21 GiB is less than desired": """
WARNING 11-30 06:51:01 [config.py:7] no ImportError: nothing of the kind
(VllmWorker-0 pid=1) ERROR 11-30 06:51:15 [multiproc_executor.py:953] Traceback (most recent call last):
(VllmWorker-0 pid=1) ERROR 11-30 06:51:15 [multiproc_executor.py:953] ValueError: 21 GiB is less than desired
(EngineCore pid=4) RuntimeError: Engine core initialization failed. See root cause above.
RuntimeError: Engine core initialization failed. See root cause above.""",
    "torch.OutOfMemoryError: no memory": "torch.OutOfMemoryError: no memory\n[2026-11-30 07:00:00] killed\nterminated",
    "a line": "\na line\n\n",
    "no output": "",
}


@pytest.mark.parametrize("said", LOGS)
def test_a_failed_start_is_told_by_its_cause(said: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(LOGS[said])
    server = servers.Server("", subprocess.Popen(["true"]), log)
    server.process.wait()
    assert servers.last_words(server) == f"{said.removeprefix('(EngineCore pid=4) ')} (log: {log})"


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_ended_leaves_no_server_and_goes_on(
    sent: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask, asked = served.ServedAsker.ask, []

    def ends(self: Any, sample: Any, request_id: str) -> Any:
        asked.append(request_id)
        if len(asked) == 2:
            os.kill(os.getpid(), sent)
            time.sleep(0.5)  # the main thread waits for this answer meanwhile
        return ask(self, sample, request_id)

    monkeypatch.setattr(served.ServedAsker, "ask", ends)
    wanted = command(tmp_path, "--quantizers", "fp8_e4m3_cast", "--modes", "gated", "--parallel", "1")
    before = signal.getsignal(signal.SIGTERM)
    # What a shell starts in the background inherits an ignored SIGINT, and would keep it.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    ended: str | int | None
    try:
        ended = main(wanted)
    except SystemExit as error:
        ended = error.code
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert ended == code
    assert signal.getsignal(signal.SIGTERM) is before
    assert not fakes()
    assert sent != signal.SIGINT or "the same command goes on" in capsys.readouterr().err
    assert main(wanted) == 0
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert row["score"] == {"value": 1.0, "low": 1.0, "high": 1.0, "count": 5}


def test_what_is_not_installed_is_said_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(served, "installed_engines", dict)
    assert main(command(tmp_path, "--quantizers", "none", "--modes", "raw")) == 2
    assert "witcert-sglang is not installed" in capsys.readouterr().err
    monkeypatch.setattr(served, "find_spec", lambda _name: None)
    assert main(command(tmp_path, "--modes", "exact")) == 2
    assert "sglang is not installed" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.log"))


def test_options_of_the_servers_are_part_of_what_answers_depend_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = command(tmp_path, "--modes", "exact", "--dtype", "float32")
    assert main(wanted) == 0
    assert json.loads((tmp_path / "settings.json").read_text()) == {
        "none exact": {"engine": "sglang", "server options": ["--dtype", "float32"], "policy": None}
    }
    assert main([*wanted, "--server-options", "--place metadata"]) == 2
    assert "with server options ['--dtype', 'float32'], this run has" in capsys.readouterr().err


def test_an_unknown_engine_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["eval", "ruler", "--model", str(CHECKPOINT), "--quantizers", "none", "--out", str(tmp_path)]
    assert main([*options, "--engine", "llama.cpp", "--no-plot"]) == 2
    assert "allowed are offline, sglang, vllm" in capsys.readouterr().err


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_server_is_started_waits_until_it_can_be_stopped(
    sent: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment between the fork and the assignment, at which nobody could stop the child."""
    real, started = subprocess.Popen, []

    def end(number: int, _frame: object) -> None:
        raise SystemExit(number)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        started.append(real(*args, **kwargs))
        signal.raise_signal(sent)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    sleeper = servers.serving([sys.executable, "-c", "import time; time.sleep(60)"], 1, env={}, log=tmp_path / "log")
    before = signal.signal(sent, end)
    try:
        with pytest.raises(SystemExit):
            sleeper.__enter__()
    finally:
        signal.signal(sent, before)
    assert started[0].poll() is not None


def test_questions_of_a_chat_go_to_the_chat_route_and_are_not_mixed_with_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--quantizers", "fp8_e4m3_cast", "--modes", "gated"]
    assert main(command(tmp_path, *options, "--chat")) == 0
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert row["score"]["value"] == 1.0
    assert main(command(tmp_path, *options)) == 2
    assert "with chat True, this run has None" in capsys.readouterr().err
