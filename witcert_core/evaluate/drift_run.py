"""`witcert eval drift`: texts are found, measured and written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from witcert_core.errors import InputError
from witcert_core.evaluate.analyses import prepare, write_table
from witcert_core.evaluate.drift import (
    DRIFT_COLUMNS,
    NATURAL,
    answers,
    drift,
    drift_rows,
    natural_text,
    read_text,
    windows,
)
from witcert_core.evaluate.meter_run import read_prompts
from witcert_core.evaluate.offline.model import load_model
from witcert_core.evaluate.progress import progress
from witcert_core.evaluate.settings import QuantizerSpec
from witcert_core.evaluate.stats import RESAMPLES


@dataclass(frozen=True)
class DriftRun:
    """What `witcert eval drift` was asked to do; of `text` and `prompts` at most one, of neither Python's own text."""

    model: str
    quantizers: Sequence[QuantizerSpec]
    out: Path
    text: Path | None
    prompts: Path | None
    chat: bool
    samples: int
    context: int
    tokens: int
    seed: int
    dtype: str


def evaluate(wanted: DriftRun, console: Console) -> dict[str, Any]:
    """Drift of every quantizer, which is also in `out` as JSON and Markdown."""
    if wanted.text is not None and wanted.prompts is not None:
        raise InputError("--text and --prompts are both given; a text is scored or prompts are answered: leave one out")
    if wanted.chat and wanted.prompts is None:
        raise InputError("--chat is for --prompts: a text is scored as it stands; leave one out or add the other")
    given = None if wanted.prompts is None else read_prompts(wanted.prompts)
    text = natural_text() if wanted.text is None else read_text(wanted.text)
    prepare(wanted.quantizers, wanted.out, plot=False)
    loaded = load_model(wanted.model, wanted.dtype, chat=wanted.chat)
    if given is not None:
        texts = answers(loaded, given, str(wanted.prompts), wanted.tokens, wanted.quantizers[0])
    else:
        name = NATURAL if wanted.text is None else str(wanted.text)
        sizes = {"count": wanted.samples, "context": wanted.context, "tokens": wanted.tokens}
        texts = windows(loaded, text, name, **sizes)
    with progress(console) as shown:
        bar = shown.add_task("drift", total=len(texts.samples))
        options = {"resamples": RESAMPLES, "seed": wanted.seed}
        found = drift(loaded, wanted.quantizers, texts, options, partial(shown.advance, bar))
    write_table(found, "drift", DRIFT_COLUMNS, drift_rows(found), wanted.out, console)
    return found
