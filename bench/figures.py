"""Make every figure and every table of measurements that README and docs show: ``make figures``.

Results go to ``docs/figures`` as JSON and SVG; ``bench/shown.py`` renders the tables from that JSON and puts them
into the pages. ``--only NAME`` makes one section (may be given again), ``--render`` only renders, which is also what a
new ``bench/sglang/results.json`` or ``bench/vllm/results.json`` needs. The real model of `bench/real.py` comes out of a
wheel on the package index; ``--size N`` takes N times as many samples. Finished sections wait in ``.cache/figures``
until all of a run are there, so a run that was stopped goes on where it was; ``--fresh`` begins anew, as does a change
of the code or of PyTorch. Dither rows are drawn anew by every run, so figures of dithered caches differ a little from
one run to the next.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from witcert_demo.run import CHECKPOINT, build_twin
from witcert_demo.smollm2 import FetchError, fetch

from bench import real, tiny
from bench.real import Models
from bench.shown import FIGURES, ROOT, put_into_pages, read_results, render
from witcert_core.evaluate.records import write_json

WORK = ROOT / ".cache" / "figures"
REAL_MODELS = ROOT / ".cache" / "smollm2"
"""Where the demonstration keeps the real model too."""
MAKERS: dict[str, Callable[[Models, Console, Path, int], dict[str, Any]]] = {**real.MAKERS, **tiny.MAKERS}
"""The longest first."""
PREFIX = "tiny_"
"""Of the sections, and so of the pictures, of the small model."""


def made_with() -> dict[str, str]:
    """What the figures depend on beside this repository."""
    return {name: version(name) for name in ("torch", "transformers")} | {"machine": platform.machine()}


def code_stamp(size: int) -> str:
    """A hash of all that decides the figures: a section made by other code, or of another size, is not taken over."""
    folders = [ROOT / "witcert_core", ROOT / "demo" / "witcert_demo", *sorted((ROOT / "plugins").glob("*/witcert_*"))]
    files = [
        *(Path(__file__).with_name(f"{name}.py") for name in ("figures", "real", "tiny")),
        CHECKPOINT / "model.safetensors",
    ]
    files += [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    digest = hashlib.sha256(json.dumps([made_with(), size]).encode())
    for path in files:
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def open_work(fresh: bool, size: int) -> list[str]:
    """The folder of unfinished runs, emptied where `fresh` or other code wrote it; returns the finished sections."""
    stamp = WORK / "stamp"
    if fresh or not stamp.exists() or stamp.read_text() != code_stamp(size):
        shutil.rmtree(WORK, ignore_errors=True)
        WORK.mkdir(parents=True)
        stamp.write_text(code_stamp(size))
    return [name for name in MAKERS if (WORK / f"{name}.json").exists()]


def make_section(name: str, size: int) -> None:
    """Measure one section, in a process of its own. NAME.json beside the folder of the section says that it is done.

    Raises:
        SystemExit: the real model cannot be had.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends this process
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        if name in real.MAKERS:
            try:
                original, twin = fetch(REAL_MODELS)
            except FetchError as error:
                raise SystemExit(f"{name}: {error}") from error
        else:
            original, twin = CHECKPOINT, build_twin(Path(scratch) / "twin")
        models = {"original": str(original), "twin": str(twin)}
        folder = WORK / name
        folder.mkdir(exist_ok=True)
        result = MAKERS[name](models, Console(quiet=True), folder, size)
    part = folder / "part"
    write_json(part, {"made_with": made_with(), **result})
    part.replace(WORK / f"{name}.json")


def make_all(names: Sequence[str], jobs: int, size: int) -> None:
    """Sections side by side, a line when one begins and ends; SystemExit names one that failed."""
    context = get_context("spawn")
    running: dict[str, tuple[Any, float]] = {}
    waiting, done = list(names), 0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                process = context.Process(target=make_section, args=(name, size), daemon=True)
                process.start()
                running[name] = process, time.monotonic()
                say(f"{name}: begun")
            time.sleep(0.2)
            for name, (process, begun) in list(running.items()):
                if process.exitcode is None:
                    continue
                del running[name]
                if process.exitcode:
                    raise SystemExit(f"{name} failed (above); the finished sections are kept for the next run")
                done += 1
                say(f"{name}: done after {(time.monotonic() - begun) / 60:.1f} minutes ({done} of {len(names)})")
    finally:
        for process, _ in running.values():
            process.terminate()
            process.join()


def publish(names: Sequence[str]) -> None:
    """Move what was measured and drawn to where README and docs look for it."""
    FIGURES.mkdir(exist_ok=True)
    for name in names:
        prefix = PREFIX if name.startswith(PREFIX) else ""
        for path in (WORK / name).glob("*.svg"):
            shutil.move(path, FIGURES / f"{prefix}{path.name}")
        shutil.move(WORK / f"{name}.json", FIGURES / f"{name}.json")
        shutil.rmtree(WORK / name)


def renew_pages() -> None:
    """Render all results and put them where README and docs show them."""
    blocks = render(read_results())
    write_json(FIGURES / "figures.json", {"blocks": blocks})
    put_into_pages(blocks)
    say(f"rendered: {', '.join(sorted(blocks))}")


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=tuple(MAKERS), help="make this section; may be given again")
    parser.add_argument("--render", action="store_true", help="measure nothing, only renew the pages")
    parser.add_argument("--fresh", action="store_true", help="take nothing over from a run that was stopped")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="sections at once (default 2)")
    parser.add_argument("--size", type=int, default=1, help="so many times as many samples (default 1)")
    options = parser.parse_args(arguments)
    for name in ("jobs", "size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    if not options.render:
        names = [name for name in MAKERS if name in (options.only or MAKERS)]
        finished = [name for name in open_work(options.fresh, options.size) if name in names]
        if finished:
            say(f"taken over from a run that was stopped: {', '.join(finished)}")
        try:
            make_all([name for name in names if name not in finished], options.jobs, options.size)
        except KeyboardInterrupt:
            say("stopped; the same command goes on where it was")
            return 130
        publish(names)
    renew_pages()
    return 0


if __name__ == "__main__":
    sys.exit(main())
