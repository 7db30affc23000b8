"""`make bench-sglang`: capacity, speed, accuracy and repairs, from real servers on this machine's CPU.

Writes bench/sglang/results.json and results.md. `--only SECTION` measures one section and keeps the others.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accuracy
import capacity
import gates_offline
import speed
import torch
from models import wide_model
from report import markdown
from witcert_demo.run import CHECKPOINT, build_twin

HERE = Path(__file__).parent
Rows = list[dict[str, Any]]


def sections(work: Path, per_task: int, num_tokens: int) -> dict[str, Callable[[], Rows]]:
    """Name -> what measures it. Models are made when first needed."""

    def made(name: str, make: Callable[[Path], Path]) -> Path:
        return work / name if (work / name).exists() else make(work / name)

    def twin() -> Path:
        return made("twin", build_twin)

    def wide() -> Path:
        return made("wide", wide_model)

    return {
        "capacity": lambda: capacity.measure(wide(), work),
        "speed": lambda: speed.measure(wide(), work, rounds=5),
        "gates": lambda: gates_offline.measure(twin(), accuracy.samples(max(1, per_task // 2), num_tokens)),
        "original": lambda: accuracy.on_the_original(CHECKPOINT, work, per_task, num_tokens),
        "twin": lambda: accuracy.on_the_twin(twin(), work, per_task, num_tokens),
    }


def main(only: list[str], per_task: int, num_tokens: int, out: Path) -> int:
    torch.set_num_threads(1)
    stored = out.with_suffix(".json")
    results: dict[str, Any] = json.loads(stored.read_text()) if only and stored.exists() else {}
    with tempfile.TemporaryDirectory(prefix="witcert-bench-") as scratch:
        for name, measure in sections(Path(scratch), per_task, num_tokens).items():
            if only and name not in only:
                continue
            begun, asked = time.monotonic(), f"--per-task {per_task} --num-tokens {num_tokens}"
            rows = measure()
            results[name] = {
                "rows": rows,
                "command": f"python bench/sglang/bench.py --only {name} {asked}",
                "date": datetime.date.today().isoformat(),
                "minutes": round((time.monotonic() - begun) / 60, 1),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, PyTorch {torch.__version__}",
            }
            stored.write_text(json.dumps(results, indent=1) + "\n")
            out.write_text(markdown(results))
            print(f"{name}: {results[name]['minutes']} min", flush=True)
    print(out.read_text())
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(sections(Path(), 1, 1))
    parser.add_argument("--only", action="append", default=[], help=f"one of {names}; may be given again")
    parser.add_argument("--per-task", type=int, default=8, help="questions of each of the three tasks (default 8)")
    parser.add_argument("--num-tokens", type=int, default=256, help="length of a prompt (default 256)")
    parser.add_argument("--out", type=Path, default=HERE / "results.md")
    options = parser.parse_args()
    sys.exit(main(options.only, options.per_task, options.num_tokens, options.out))
