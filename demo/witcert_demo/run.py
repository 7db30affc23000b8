"""The demonstration: real SGLang servers on this CPU, asked the same questions, metered while they answer.

First the outlier twin of a model with a plain 16-bit cache; then the same with quantized caches. Of each the meter's
bound is shown per layer and head, beside the answers, while every bound is audited against exact attention. The model
is a real one of 30 layers that chats, or, where that cannot be had, the small one of this repository.
"""

from __future__ import annotations

import importlib.util
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from rich.console import Console
from rich.live import Live
from rich.status import Status

from witcert_core.evaluate.askers import summary_of
from witcert_demo.chat import MAX_NEW_TOKENS as CHAT_TOKENS
from witcert_demo.chat import QUESTIONS, ChatQuestion
from witcert_demo.live import outcome, overview, panel
from witcert_demo.score import exact_match
from witcert_demo.servers import Server, ServerError, running_server
from witcert_demo.smollm2 import FetchError, fetch
from witcert_demo.tally import Asked, Tally
from witcert_demo.tasks import Sample, make_samples
from witcert_demo.twin import write_twin

CHECKPOINT = Path(__file__).parent / "needle_tiny"
MODELS = ("smollm2", "tiny")
Caches = Mapping[str, Mapping[str, Any]]
CACHES: Caches = {name: {} for name in ("fp8_e4m3_cast", "int4_token_group", "int8_dither")}
"""By the quantizer's name, what else the policy says of it."""
BYPASS: Caches = {"int8_dither_bypass": {"storage": "packed"}}
"""Outlier channels in 16 bit, which a packed cache alone keeps."""
TASKS = ("single_needle", "multi_key", "multi_query", "variable_tracking")
EXACT_NAME = "16 bit"
MAX_NEW_TOKENS = 16
FONT_FACES = re.compile(r"@font-face \{.*?\}", re.S)  # rich's pictures fetch fonts from elsewhere; ours do not
PLAIN_WIDTH = 120  # columns of a picture, or of output that goes to a file


@dataclass(frozen=True)
class Show:
    """What is shown: a model's twin with each of the caches, asked the samples by `ask`.

    dtype: of the metered servers; about: what is said of that, and kind: what the model is.
    """

    kind: str
    about: str
    twin: Path
    caches: Caches
    dtype: str
    samples: Sequence[Sample] | Sequence[ChatQuestion]
    ask: Callable[[Server, Any], Asked]


def tiny_show(directory: Path, per_task: int, num_tokens: int) -> Show:
    """The small model of this repository; its twin is written to `directory`."""
    return Show(
        kind=f"a small retrieval model, asked for what prompts of {num_tokens} tokens hold",
        about="The metered servers compute in float32, so that quantization is all that differs from exact.",
        twin=build_twin(directory),
        caches=CACHES,
        dtype="float32",
        samples=questions(per_task, num_tokens),
        ask=ask,
    )


def smollm2_show(directory: Path) -> Show:
    """The real model, kept in `directory`; FetchError where it cannot be had."""
    return Show(
        kind="SmolLM2-135M-Instruct (30 layers of 9 heads)",
        about="The metered servers compute in bfloat16 as well: their caches are all that differs.",
        twin=fetch(directory)[1],
        caches={**CACHES, **BYPASS},
        dtype="bfloat16",
        samples=QUESTIONS,
        ask=ask_chat,
    )


def choose_show(
    console: Console, model: str | None, models: Path, scratch: Path, per_task: int, num_tokens: int
) -> Show:
    """The show of `model`; of None, the real model where it can be had, else the small one, which is said."""
    if model != "tiny":
        try:
            console.print("SmolLM2-135M-Instruct: fetched once, 93 MB, and kept in " + str(models), markup=False)
            return smollm2_show(models)
        except FetchError as error:
            if model is not None:
                raise
            console.print(
                f"{error}. Shown instead is the small model of this repository (make demo MODEL=tiny).", markup=False
            )
    return tiny_show(scratch / "twin", per_task, num_tokens)


def write_policy(path: Path, quantizer: Mapping[str, Any]) -> Path:
    """A policy that meters and audits every decode row: for looking, not for production."""
    policy = {
        "version": 1,
        "quantizer": dict(quantizer),
        "meter": {"stride": 1, "audit_every": 1},
        "gate": {"kind": "observe"},
    }
    path.write_text(yaml.safe_dump(policy, sort_keys=False))
    return path


def build_twin(directory: Path) -> Path:
    """The outlier twin of the shipped checkpoint, with its tokenizer, in `directory`."""
    write_twin(CHECKPOINT, directory)
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


def ask_chat(server: Server, question: ChatQuestion) -> Asked:
    """The same of a chat model, through its chat route, which applies the model's template."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": question.message}],
        "temperature": 0,
        "max_tokens": CHAT_TOKENS,
    }
    with server.client() as client:
        reply = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    answer = reply["choices"][0]["message"]["content"].strip()
    found = question.expected is not None and question.expected in answer
    return Asked(question, answer, found, summary_of(reply), open=question.expected is None)


def ask_all(server: Server, tally: Tally, show: Show, drawn: Callable[[], None]) -> None:
    for sample in show.samples:
        tally.add(show.ask(server, sample))
        drawn()


def run(console: Console, *, model: str | None, models: Path, per_task: int, num_tokens: int, logs: Path) -> int:
    """The whole demonstration; returns the exit code: 0, or 1 when an audited cell broke its bound."""
    with tempfile.TemporaryDirectory(prefix="witcert-demo-") as scratch:
        logs.mkdir(parents=True, exist_ok=True)
        show = choose_show(console, model, models, Path(scratch), per_task, num_tokens)
        console.print(
            f"[bold]WitCert[/bold]: the outlier twin of {show.kind}, {len(show.samples)} questions, "
            f"{1 + len(show.caches)} SGLang servers on this CPU, one after the other. Their logs: {logs}"
        )
        exact = Tally(EXACT_NAME)
        options = ["--disable-radix-cache"]  # every question is new, and so every prompt row reads its own exact keys
        with serve(console, EXACT_NAME, show.twin, None, logs, ["--dtype", "bfloat16", *options]) as server:
            ask_all(server, exact, show, lambda: None)
        console.print(f"{EXACT_NAME} cache (bfloat16 model and cache, no meter): {outcome(exact)}. {show.about}")
        tallies = []
        for name, settings in show.caches.items():
            tally = Tally(name)
            policy = write_policy(Path(scratch) / f"{name}.yaml", {"name": name, **settings})
            with serve(console, name, show.twin, policy, logs, ["--dtype", show.dtype, *options]) as server:
                show_live(console, server, tally, exact, show)
            tallies.append(tally)
        console.print(overview(tallies, exact))
        for tally in tallies:
            console.print(tally.sentence(exact))
        audited, violations = sum(t.audited for t in tallies), sum(t.violations for t in tallies)
        console.print(f"Audit: {audited} cells compared with exact attention, [bold]{violations} violations[/bold].")
        if mismatches := sum(t.mismatches for t in tallies):
            console.print(f"[bold red]{mismatches} outputs are not attention over what is stored.[/bold red]")
    return 1 if violations or mismatches or not audited else 0


def show_live(console: Console, server: Server, tally: Tally, exact: Tally, show: Show) -> None:
    """Ask every question and redraw the panel after each; without a terminal only the last one is printed."""
    total = len(show.samples)
    if console.is_terminal:
        with Live(panel(tally, exact, total), console=console, auto_refresh=False) as live:
            ask_all(server, tally, show, lambda: live.update(panel(tally, exact, total), refresh=True))
    else:
        ask_all(server, tally, show, lambda: None)
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


def main(model: str | None, models: Path, per_task: int, num_tokens: int, svg: Path | None, logs: Path) -> int:
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
        code = run(console, model=model, models=models, per_task=per_task, num_tokens=num_tokens, logs=logs)
    except (FetchError, ServerError) as error:
        console.print(f"[red]{error}[/red]")
        return 1
    except KeyboardInterrupt:
        console.print("stopped; no server is left running")
        return 130
    if svg is not None:
        svg.write_text(FONT_FACES.sub("", console.export_svg(title="make demo")))
    return code
