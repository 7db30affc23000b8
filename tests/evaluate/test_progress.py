"""How far a long command is, where there is no terminal."""

from __future__ import annotations

import threading
import time
from io import StringIO

import pytest
from rich.console import Console
from rich.progress import Progress

from witcert_core.evaluate.progress import ProgressLines, progress


def test_without_a_terminal_lines_on_stderr_say_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    said = ""
    with ProgressLines(every_s=0.01) as shown:
        first = shown.add_task("kivi raw", total=3, completed=1)
        shown.advance(first)
        give_up = time.monotonic() + 30
        while not said and time.monotonic() < give_up:
            said = capsys.readouterr().err
    assert said.startswith("witcert: kivi raw: 2 of 3 done after ")
    assert not [thread for thread in threading.enumerate() if thread.name == "witcert-progress"]


def test_the_line_is_of_the_task_begun_last() -> None:
    shown = ProgressLines()
    old, new = shown.add_task("old", total=2), shown.add_task("new", total=5)
    shown.advance(old)
    shown.advance(new)
    shown.advance(new)
    assert shown.line().startswith("witcert: new: 2 of 5 done after ")


def test_a_command_that_is_quick_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(Console(file=StringIO())) as shown:
        assert isinstance(shown, ProgressLines)
        shown.advance(shown.add_task("quick", total=1))
    assert capsys.readouterr() == ("", "")
    assert isinstance(progress(Console(force_terminal=True, file=StringIO())), Progress)
