"""The command line: one-line errors with exit code 2, and what each command prints."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

from witcert_core import load_policy
from witcert_core.cli import main
from witcert_core.policy.plugins import quantizer_registry
from witcert_core.policy.presets import PRESETS, preset_text
from witcert_core.serving.hub import unreachable_hub


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"witcert {version('witcert')}\n"


def test_the_installed_command_is_this_one() -> None:
    (entry,) = entry_points(group="console_scripts", name="witcert")
    assert entry.load() is main


@pytest.mark.parametrize("preset", PRESETS)
def test_init_writes_a_preset_that_check_accepts(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.yaml"
    assert main(["policy", "init", "--preset", preset, str(path)]) == 0
    assert path.read_text() == preset_text(preset)
    assert f"WITCERT_POLICY={path}" in capsys.readouterr().out
    assert main(["policy", "check", str(path)]) == 0
    assert f"{path}: ok: quantizer {load_policy(path).quantizer.name}" in capsys.readouterr().out


def test_init_defaults_and_never_overwrites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["policy", "init"]) == 0
    Path("policy.yaml").write_text("mine")
    assert main(["policy", "init"]) == 2
    assert capsys.readouterr().err == "witcert: policy.yaml: exists already; --force overwrites it\n"
    assert Path("policy.yaml").read_text() == "mine"
    assert main(["policy", "init", "--force"]) == 0
    assert Path("policy.yaml").read_text() == preset_text("observe")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["polcy"], "No such command 'polcy'"),
        (["--nonsense"], "No such option"),
        (["policy", "check"], "Missing argument"),
        (["policy", "check", "nowhere.yaml"], "nowhere.yaml: cannot be read: No such file or directory"),
        (
            ["policy", "init", "--preset", "gate", "x"],
            "unknown preset 'gate' (did you mean 'gated'?); known: observe",
        ),
        (
            ["policy", "init", "/no/such/p.yaml"],
            "/no/such/p.yaml: cannot be written: No such file or directory",
        ),
        (["quantizers", "--head-dim", "0"], "Invalid value for '--head-dim'"),
        (["bounds", "check", "nowhere.json"], "nowhere.json"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("witcert: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_bad_policy_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\nquantizer: {name: none}\ngate: {tua: .1}")
    assert main(["policy", "check", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"witcert: {path}: gate.tua: unknown key (did you mean 'tau'?)")
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["policy"], ["bounds"]])
def test_without_a_command_it_helps(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert "Usage: witcert" in printed.out + printed.err
    assert "witcert: \n" not in printed.err


def test_quantizers_lists_every_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantizers", "--head-dim", "80"]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.split()}
    assert set(quantizer_registry().names()) <= set(rows)
    assert rows["int8_dither"][1:4] == ["probabilistic", "172", "53.8%"]
    assert rows["int8_dither_w"][1:3] == ["probabilistic+w", "175"]
    assert rows["int4_token_group"][1:6] == ["deterministic", "104", "32.5%", "yes", "group_size"]
    assert rows["none"][-3:] == ["witcert", "(built", "in)"]


def test_a_width_that_one_quantizer_lacks_leaves_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantizers", "--head-dim", "2"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "not this wide" in line]
    assert [row.split()[0] for row in rows] == ["int8_dither_bypass"]
    assert main(["quantizers", "--head-dim", "33", "--check"]) == 2
    assert "takes an even one" in capsys.readouterr().err


def test_quantizers_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantizers", "--check"]) == 0
    assert "all keep their contract" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("shell", "code", "error"),
    [
        ("quantizers > /dev/full", 2, "witcert: reading or writing failed: No space left on device\n"),
        ("--help > /dev/full", 2, "witcert: reading or writing failed: No space left on device\n"),
        ("quantizers >&-", 0, ""),
        ("quantizers | true; exit ${PIPESTATUS[0]}", 141, ""),
        ("policy init ü😀.yaml", 0, ""),
        ("policy check $'a\\e[31m'", 2, "witcert: a\\x1b[31m: cannot be read: No such file or directory\n"),
        ("-h", 0, ""),
    ],
)
def test_streams_as_a_shell_gives_them(shell: str, code: int, error: str, tmp_path: Path) -> None:
    """Full, closed, without a reader, and in an encoding that lacks a letter: one line at most, no traceback."""
    program = "import sys; from witcert_core.cli import main; sys.exit(main())"
    command = ["bash", "-c", f'"$0" -c "$1" {shell}', sys.executable, program]
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr.decode()) == (code, error)


def test_without_numpy_there_is_no_warning() -> None:
    code = "import sys; sys.modules['numpy'] = None; import witcert_core.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_init_says_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["policy", "init", "a b.yaml"]) == 0
    assert "WITCERT_POLICY='a b.yaml'" in capsys.readouterr().out
    assert main(["policy", "init", str(tmp_path)]) == 2
    assert "is a directory; name a file" in capsys.readouterr().err


def test_a_hub_out_of_reach_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("witcert_core.serving.hub.getproxies", dict)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", "/nonexistent")
    said = unreachable_hub("some/model")
    assert said == (
        "some/model is no directory here, and https://huggingface.co cannot be reached: Name or service not known"
    )
    assert unreachable_hub("/") is None
    monkeypatch.setattr("witcert_core.serving.hub.getproxies", lambda: {"https": "http://proxy"})
    assert unreachable_hub("some/model") is None


def test_the_command_as_a_process(tmp_path: Path) -> None:
    """Exit code and streams as a shell sees them, from another directory."""
    command = [sys.executable, "-c", "import sys; from witcert_core.cli import main; sys.exit(main())"]
    done = subprocess.run(
        [*command, "policy", "check", "p.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "witcert: p.yaml: cannot be read: No such file or directory\n"
