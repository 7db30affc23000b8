"""The demonstration: real SGLang servers on this CPU, asked the same questions, metered while they answer.

First the outlier twin with a plain 16-bit cache; then the same model with three quantized caches. Of each the meter's
bound is shown per layer and head, next to whether the answer was right, while every bound is audited against exact
attention.
"""

from __future__ import annotations

import importlib.util
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType

import yaml
from rich.console import Console
from rich.live import Live
from rich.status import Status

from witcert_demo.checkpoint import read_checkpoint, write_checkpoint
from witcert_demo.live import overview, panel
from witcert_demo.score import exact_match
from witcert_demo.servers import Server, ServerError, running_server
from witcert_demo.tally import Asked, Tally
from witcert_demo.tasks import Sample, make_samples
from witcert_demo.twin import outlier_twin

CHECKPOINT = Path(__file__).parent / "needle_tiny"
QUANTIZERS = ("fp8_e4m3_cast", "int4_token_group", "int8_dither")
TASKS = ("single_needle", "multi_key", "multi_query", "variable_tracking")
EXACT_NAME = "16 bit"
MAX_NEW_TOKENS = 16
FONT_FACES = re.compile(r"@font-face \{.*?\}", re.S)  # rich's pictures fetch fonts from elsewhere; ours do not
PLAIN_WIDTH = 120  # columns of a picture, or of output that goes to a file


def write_policy(path: Path, quantizer: str) -> Path:
    """A policy that meters and audits every decode row: for looking, not for production."""
    policy = {
        "version": 1,
        "quantizer": {"name": quantizer},
        "meter": {"stride": 1, "audit_every": 1},
        "gate": {"kind": "observe"},
    }
    path.write_text(yaml.safe_dump(policy, sort_keys=False))
    return path


def build_twin(directory: Path) -> Path:
    """The outlier twin of the shipped checkpoint, with its tokenizer, in `directory`."""
    state_dict, config = read_checkpoint(CHECKPOINT)
    write_checkpoint(directory, outlier_twin(state_dict, config), config)
    return directory


def questions(per_task: int, num_tokens: int) -> list[Sample]:
    """The same questions for every server, the tasks in turn."""
    by_task = [make_samples(task, num_tokens, per_task, seed=11) for task in TASKS]
    return [sample for group in zip(*by_task, strict=True) for sample in group]


def ask(server: Server, sample: Sample) -> Asked:
    """Put one question to a server (greedy decoding) and score the answer."""
    body = {
        "text": sample.prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS},
    }
    with server.client() as client:
        reply = client.post("/generate", json=body).raise_for_status().json()
    return Asked(
        sample, reply["text"].strip(), exact_match(sample, reply["output_ids"]), reply["meta_info"].get("witcert")
    )


def ask_all(server: Server, tally: Tally, samples: Sequence[Sample], drawn: Callable[[], None]) -> None:
    for sample in samples:
        tally.add(ask(server, sample))
        drawn()


def run(console: Console, *, per_task: int, num_tokens: int, logs: Path) -> int:
    """The whole demonstration; returns the exit code: 0, or 1 when an audited cell broke its bound."""
    samples = questions(per_task, num_tokens)
    with tempfile.TemporaryDirectory(prefix="witcert-demo-") as scratch:
        logs.mkdir(parents=True, exist_ok=True)
        twin = build_twin(Path(scratch) / "twin")
        console.print(
            f"[bold]WitCert[/bold]: the outlier twin of a small retrieval model, {len(samples)} questions of "
            f"{num_tokens} tokens, four SGLang servers on this CPU, one after the other. Their logs: {logs}"
        )
        exact = Tally(EXACT_NAME)
        options = ["--disable-radix-cache"]  # every question is new, and so every prompt row reads its own exact keys
        with serve(console, EXACT_NAME, twin, None, logs, ["--dtype", "bfloat16", *options]) as server:
            ask_all(server, exact, samples, lambda: None)
        console.print(
            f"{EXACT_NAME} cache (bfloat16 model and cache, no meter): {exact.right} of {len(samples)} answers right. "
            "The metered servers compute in float32, so that quantization is all that differs from exact."
        )
        tallies = []
        for name in QUANTIZERS:
            tally = Tally(name)
            policy = write_policy(Path(scratch) / f"{name}.yaml", name)
            with serve(console, name, twin, policy, logs, ["--dtype", "float32", *options]) as server:
                show_live(console, server, tally, exact, samples)
            tallies.append(tally)
        console.print(overview(tallies, exact))
        for tally in tallies:
            console.print(tally.sentence(exact))
        audited, violations = sum(t.audited for t in tallies), sum(t.violations for t in tallies)
        console.print(f"Audit: {audited} cells compared with exact attention, [bold]{violations} violations[/bold].")
        if mismatches := sum(t.mismatches for t in tallies):
            console.print(f"[bold red]{mismatches} outputs are not attention over what is stored.[/bold red]")
    return 1 if violations or mismatches or not audited else 0


def show_live(console: Console, server: Server, tally: Tally, exact: Tally, samples: Sequence[Sample]) -> None:
    """Ask every question and redraw the panel after each; without a terminal only the last one is printed."""
    total = len(samples)
    if console.is_terminal:
        with Live(panel(tally, exact, total), console=console, auto_refresh=False) as live:
            ask_all(server, tally, samples, lambda: live.update(panel(tally, exact, total), refresh=True))
    else:
        ask_all(server, tally, samples, lambda: None)
        console.print(panel(tally, exact, total))


class serve(AbstractContextManager[Server]):
    """A server with its start shown: a spinner with the seconds waited, or one line where there is no terminal."""

    def __init__(
        self, console: Console, name: str, model: Path, policy: Path | None, logs: Path, options: Sequence[str]
    ) -> None:
        self.console = console
        self.name = name
        self.started = time.monotonic()
        self.context = running_server(
            model,
            policy=policy,
            log=logs / f"server-{name.replace(' ', '-')}.log",
            options=options,
            waiting=self.waiting,
        )
        self.status: Status | None = None

    def waiting(self, seconds: float) -> None:
        if self.status is not None:
            self.status.update(f"starting the {self.name} server ({seconds:.0f} s; about 20 s on two cores)")

    def __enter__(self) -> Server:
        text = f"starting the {self.name} server"
        spinner: AbstractContextManager[Status | None]
        spinner = self.console.status(text) if self.console.is_terminal else nullcontext(None)
        if not self.console.is_terminal:
            self.console.print(f"{text} ...")
        with spinner as self.status:
            server = self.context.__enter__()
        self.console.print(f"{self.name} server up after {time.monotonic() - self.started:.0f} s")
        return server

    def __exit__(self, *error: object) -> None:
        self.context.__exit__(*error)  # type: ignore[arg-type]


def stop_on_signal(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(per_task: int, num_tokens: int, svg: Path | None, logs: Path) -> int:
    """Run on the terminal; with `svg` the same output is also saved as a picture."""
    if importlib.util.find_spec("sglang") is None:
        print("SGLang is not installed in this environment; `make demo` makes one that has it", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop_on_signal)  # so that servers are stopped on the way out
    console = Console(record=svg is not None, highlight=False)
    if svg is not None or not console.is_terminal:
        console.width = PLAIN_WIDTH
    try:
        code = run(console, per_task=per_task, num_tokens=num_tokens, logs=logs)
    except ServerError as error:
        console.print(f"[red]{error}[/red]")
        return 1
    except KeyboardInterrupt:
        console.print("stopped; no server is left running")
        return 130
    if svg is not None:
        svg.write_text(FONT_FACES.sub("", console.export_svg(title="make demo")))
    return code
