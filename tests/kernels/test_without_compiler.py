"""A CPU without a compiler, with one that fails, or with nowhere to keep what was compiled: one line says so, and plain
torch serves."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from witcert_core.kernels.native import build, toolchain
from witcert_core.serving.banner import banner_text
from witcert_core.serving.doctor import kernels as finding
from witcert_core.serving.storage.acts import TorchSums

from . import test_serving, test_simulated


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A process that has compiled nothing, and found nothing; where it would."""

    def forget() -> None:
        build.not_compiled.cache_clear()
        build.compiled.cache_clear()

    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


def use(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Let a shell script be the compiler."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def no_compiler(monkeypatch: pytest.MonkeyPatch, _folder: Path) -> str:
    monkeypatch.setenv("CXX", "/nonexistent")
    return "there is no compiler '/nonexistent'; install g++ or clang++, or name one in CXX"


def failing_compiler(monkeypatch: pytest.MonkeyPatch, _folder: Path) -> str:
    monkeypatch.setenv("CXX", "false")
    return "false ended with 1 and made nothing"


def old_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    use(monkeypatch, folder, "echo \"c++: error: unrecognized command line option '-std=c++17'\" >&2\nexit 1")
    return "c++: error: unrecognized command line option '-std=c++17'"


def no_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    (folder / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "file"))
    return "set XDG_CACHE_HOME"


def nothing_to_load(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """A library that is none, as on a file system that fills up or lets nothing be executed."""
    use(monkeypatch, folder, 'while [ "$1" != "-o" ]; do shift; done\necho no library > "$2"')
    return f"delete {folder / 'witcert'}, or set XDG_CACHE_HOME"


@pytest.mark.parametrize("missing", [no_compiler, failing_compiler, old_compiler, no_folder, nothing_to_load])
def test_plain_torch_serves_and_one_line_says_why(
    missing: object, monkeypatch: pytest.MonkeyPatch, cold: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert callable(missing)
    why = missing(monkeypatch, cold)
    packed = test_serving.Served("asked", "int8_dither")
    simulated = test_simulated.Served("asked", "int4_token_group", torch.float32)
    assert packed.storage.kernels is None
    assert simulated.who is TorchSums
    for served in (packed, simulated):
        for new in test_serving.PASSES:
            served.step(new)  # audits itself
        (line,) = [x for x in banner_text(served.runtime, answers="", metrics="").splitlines() if "kernels  " in x]
        assert "plain torch: kernels for the CPU are not compiled: " in line
        assert why in line
    found = finding(packed.runtime.policy, "cpu", 64)
    assert (found.level, found.subject) == ("note", "kernels")
    assert why in found.text
    assert "Traceback" not in capfd.readouterr().err


def test_heads_that_kernels_have_no_room_for_are_left_to_torch() -> None:
    policy = test_serving.Served("torch", "int8_dither").runtime.policy
    assert "heads have 24 channels" in finding(policy, "cpu", 24).text


def ask(_number: int) -> str | None:
    return build.not_compiled()


def test_two_processes_that_start_together_compile_once(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = cold / "log"
    path = cold / "counted"
    path.write_text(f'#!/bin/sh\necho compiled >> {log}\nexec c++ "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(ask, range(2), chunksize=1) == [None, None]
    assert len(log.read_text().splitlines()) == len(toolchain.operations())
    assert build.not_compiled() is None  # which loads what they made
    assert (
        "compiled for this processor" in finding(test_serving.Served("torch", "int8_dither").runtime.policy, "cpu").text
    )


def test_a_process_that_died_compiling_is_not_waited_for(cold: Path) -> None:
    folder = cold / "witcert"
    folder.mkdir()
    code = f"import fcntl, os; fcntl.flock(os.open({str(folder)!r}, os.O_RDONLY), fcntl.LOCK_EX); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    assert ctypes.CDLL(str(build._libraries(["witness"], "native")[0])).witcert_run


def test_a_lock_that_nobody_gives_back_is_not_waited_for_forever(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "PATIENCE", 0.2)
    folder = cold / "witcert"
    folder.mkdir()
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        begun = time.monotonic()
        assert build._libraries(["witness"], "native")[0].exists()
        assert time.monotonic() - begun >= 0.2
    finally:
        os.close(handle)
