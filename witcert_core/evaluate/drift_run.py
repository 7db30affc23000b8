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
from witcert_core.evaluate.askers import UrlAsker
from witcert_core.evaluate.drift import (
    DRIFT_COLUMNS,
    NATURAL,
    answers,
    drift,
    drift_rows,
    encode_all,
    natural_text,
    read_text,
    windows,
)
from witcert_core.evaluate.drift_served import served_drift
from witcert_core.evaluate.meter_run import read_prompts
from witcert_core.evaluate.offline.model import load_model, load_tokenizer
from witcert_core.evaluate.offline.placement import HOST, Placement
from witcert_core.evaluate.progress import progress
from witcert_core.evaluate.records import make_directory
from witcert_core.evaluate.settings import QuantizerSpec
from witcert_core.evaluate.stats import RESAMPLES


@dataclass(frozen=True)
class DriftRun:
    """What `witcert eval drift` was asked to do: `model` offline, or the server at `url` (`model`: its tokenizer).

    Of `text` and `prompts` at most one, of neither Python's own text.
    """

    model: str | None
    url: str | None
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
    placement: Placement = HOST


def evaluate(wanted: DriftRun, console: Console) -> dict[str, Any]:
    """Drift of every quantizer, or of the server's own, which is also in `out` as JSON and Markdown."""
    refuse_what_would_be_ignored(wanted)
    given = None if wanted.prompts is None else read_prompts(wanted.prompts)
    text = natural_text() if wanted.text is None else read_text(wanted.text)
    options = {"resamples": RESAMPLES, "seed": wanted.seed}
    sizes = {"count": wanted.samples, "context": wanted.context, "tokens": wanted.tokens}
    name = str(wanted.prompts or wanted.text or NATURAL)
    if wanted.url is not None:
        make_directory(wanted.out)
        server = UrlAsker(wanted.url)
        tokenizer = load_tokenizer(wanted.model or server.model_path)
        if given is not None:
            prompts, about = encode_all(tokenizer, given, name, chat=wanted.chat), {"prompts": name}
        else:
            cut = windows(tokenizer, text, name, **sizes)
            prompts, about = [sample.prompt for sample in cut.samples], dict(cut.about)
        with progress(console) as shown:
            bar = shown.add_task("drift", total=len(prompts))
            found = served_drift(server, prompts, wanted.tokens, about, options, partial(shown.advance, bar))
    elif wanted.model is not None:
        prepare(wanted.quantizers, wanted.out, plot=False)
        loaded = load_model(wanted.model, wanted.dtype, chat=wanted.chat, placement=wanted.placement)
        if given is not None:
            texts = answers(loaded, given, name, wanted.tokens, wanted.quantizers[0])
        else:
            texts = windows(loaded.tokenizer, text, name, **sizes)
        with progress(console) as shown:
            bar = shown.add_task("drift", total=len(texts.samples))
            found = drift(loaded, wanted.quantizers, texts, options, partial(shown.advance, bar))
    else:
        raise InputError("neither --model nor --url is given; one of them says what is measured")
    write_table(found, "drift", DRIFT_COLUMNS, drift_rows(found), wanted.out, console)
    return found


def refuse_what_would_be_ignored(wanted: DriftRun) -> None:
    """InputError for an option that means nothing beside the others."""
    if wanted.text is not None and wanted.prompts is not None:
        raise InputError("--text and --prompts are both given; a text is scored or prompts are answered: leave one out")
    if wanted.chat and wanted.prompts is None:
        raise InputError("--chat is for --prompts: a text is scored as it stands; leave one out or add the other")
    of_a_model = {"--quantizers": bool(wanted.quantizers), "--dtype": wanted.dtype != "auto"}
    of_a_model["--device"] = bool(wanted.placement.about)
    for option, is_given in of_a_model.items():
        if wanted.url is not None and is_given:
            raise InputError(f"{option} says how a model is run, but what is at --url runs already; leave one out")
