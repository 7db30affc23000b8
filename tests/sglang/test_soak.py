"""A minute and a half of `make soak`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sglang
ROOT = Path(__file__).parents[2]


def test_ninety_seconds_of_load() -> None:
    command = [sys.executable, "-m", "bench.sglang.soak", "--seconds", "90"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    observing, repairing = (json.loads(line) for line in done.stdout.splitlines())
    for phase in (observing, repairing):
        assert phase["answered"] > 10
        assert phase["audited_cells"] > 100
    assert observing["cached_tokens"] > 0
    assert repairing["repaired_blocks"] > 0
