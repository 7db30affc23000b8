"""Measure sections one by one; each leaves its rows in a JSON file and the page is written anew after it."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from bench.common.report import Columns, markdown

Rows = list[dict[str, Any]]
Sections = Mapping[str, Callable[[], Rows]]
"""Name of a section -> what measures it."""


def main(
    module: str,
    about: str | None,
    head: str,
    shown: Mapping[str, tuple[str, Columns]],
    build: Callable[[Path, int, int], Sections],
) -> int:
    """The command line of a bench.

    Args:
        module: its name, as a user types it; results go beside it as results.json and results.md.
        about: its help.
        head: what the page begins with.
        shown: title and columns of every section.
        build: (folder for models and logs, questions a task, length of a prompt) -> the sections.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], choices=list(shown), help="may be given again")
    parser.add_argument("--per-task", type=int, default=8, help="questions of each of the three tasks (default 8)")
    parser.add_argument("--num-tokens", type=int, default=256, help="length of a prompt (default 256)")
    parser.add_argument("--out", type=Path, default=Path(module.replace(".", "/")).with_name("results.md"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    stored = options.out.with_suffix(".json")
    results: dict[str, Any] = json.loads(stored.read_text()) if options.only and stored.exists() else {}
    with tempfile.TemporaryDirectory(prefix="witcert-bench-") as scratch:
        for name, measure in build(Path(scratch), options.per_task, options.num_tokens).items():
            if options.only and name not in options.only:
                continue
            begun, asked = time.monotonic(), f"--per-task {options.per_task} --num-tokens {options.num_tokens}"
            rows = measure()
            results[name] = {
                "rows": rows,
                "command": f"python -m {module} --only {name} {asked}",
                "date": datetime.date.today().isoformat(),
                "minutes": round((time.monotonic() - begun) / 60, 1),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}, "
                f"PyTorch {torch.__version__}",
            }
            stored.write_text(json.dumps(results, indent=1) + "\n")
            options.out.write_text(markdown(results, head, shown))
            print(f"{name}: {results[name]['minutes']} min", flush=True)
    print(options.out.read_text())
    return 0
