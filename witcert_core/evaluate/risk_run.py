"""`witcert eval risk`: requests are made, measured, halved and written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from witcert_core.evaluate.analyses import Inputs, write_table
from witcert_core.evaluate.drift import NATURAL, natural_text, read_text, windows
from witcert_core.evaluate.progress import progress
from witcert_core.evaluate.risk import STRIDE, analyse, measure, requests_of
from witcert_core.evaluate.settings import QuantizerSpec
from witcert_core.evaluate.tables import interval

COLUMNS = (
    "KV cache",
    "requests",
    "changed",
    "rank correlation with KL",
    "AUROC of changed texts",
    "needles lost",
    "AUROC of lost needles",
    "rank correlation of the true TV",
)


@dataclass(frozen=True)
class Prose:
    """`count` windows of `text` (None: Python's own), `context` tokens each, which the exact cache goes on with for
    `tokens` tokens."""

    text: Path | None
    count: int
    context: int
    tokens: int


def evaluate(
    inputs: Inputs, specs: Sequence[QuantizerSpec], prose: Prose, out: Path, console: Console
) -> dict[str, Any]:
    """What each statistic is worth on the prose and on the samples of `inputs`; also in `out` as JSON and Markdown."""
    text = natural_text() if prose.text is None else read_text(prose.text)
    name = str(prose.text or NATURAL)
    cut = windows(inputs.loaded.tokenizer, text, name, count=prose.count, context=prose.context, tokens=prose.tokens)
    requests = requests_of(inputs.loaded, specs[0], cut.samples, inputs.samples)
    with progress(console) as shown:
        bar = shown.add_task("risk", total=len(requests))
        rows = measure(inputs.loaded, specs, requests, partial(shown.advance, bar))
    needles = sum(request.needle for request in requests)
    about = {**inputs.about, "stride": STRIDE, **cut.about, "prose": len(requests) - needles, "needles": needles}
    found = {**analyse(rows, inputs.options), "about": about}
    write_table(found, "risk", COLUMNS, risk_rows(found), out, console)
    return found


def risk_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """A line a quantizer, and one for all of them together."""
    rows = [risk_row(name, result, found["truth"][name]) for name, result in found["quantizers"].items()]
    return [*rows, risk_row("all together", found["across"], found["across_truth"])]


def risk_row(name: str, result: Mapping[str, Any], truth: Mapping[str, Any]) -> list[str]:
    """One of them; truth: the same of the true TV."""
    return [
        name,
        str(result["requests"]),
        str(result["changed"]),
        interval(result["kl"]),
        interval(result["auroc_changed"]),
        f"{result['lost']} of {result['needles']}",
        interval(result["auroc_lost"]),
        interval(truth["kl"]),
    ]
