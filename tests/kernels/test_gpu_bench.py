"""``bench/gpu.sh`` without a GPU: all but the timing runs, so that a GPU does not meet a typing error."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_dry_run_goes_through_every_check_and_every_measurement() -> None:
    before = (ROOT / "bench" / "gpu.md").read_text()
    command = [sys.executable, "-m", "bench.gpu", "--dry-run"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr
    done, planned = re.findall(r"checks: (\d+) of (\d+) passed", run.stdout)[0]
    assert done == planned == "8"
    for name in ("append", "record"):
        assert f"- {name}: " in run.stdout
    assert re.search(r"\| 2 \| 32 \| \d+ \| [0-9.]+x fastest 16-bit \|", run.stdout)
    assert (ROOT / "bench" / "gpu.md").read_text() == before
