"""What an installation brings, and the one line that says an engine is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
ENGINES = {"sglang", "vllm", "triton", "flashinfer-python", "transformers"}
WITHOUT_ENGINES = """
import importlib.util, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "sglang" else real(name, *rest)
"""


def test_the_core_alone_brings_no_engine() -> None:
    always = [r for r in map(Requirement, requires("witcert") or []) if r.marker is None]
    assert {r.name for r in always} & ENGINES == set()
    assert len(always) <= 9  # Jinja2 among them, which PyTorch brings
    assert all(r.specifier for r in always)


def test_importing_the_core_imports_no_engine() -> None:
    code = f"import sys, witcert_core, witcert_core.cli; sys.exit(bool({ENGINES!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.mark.parametrize(
    "code",
    [
        "import witcert_sglang; witcert_sglang.load()",
        "from witcert_demo.run import main; sys.exit(main(None, None, 1, 64, None, None))",
    ],
    ids=["adapter", "demonstration"],
)
def test_a_missing_engine_is_one_clear_line(code: str) -> None:
    env = {**os.environ, "WITCERT_POLICY": "policy.yaml", "PYTHONPATH": str(ROOT / "adapters" / "sglang")}
    command = [sys.executable, "-c", WITHOUT_ENGINES + code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert "SGLang is not installed" in line
