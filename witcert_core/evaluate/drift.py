"""`witcert eval drift`: how far the next token's law is from the exact cache's. Measured, not bounded.

The same tokens go through the exact cache and through each quantized one: natural text, or what greedy decoding writes
from the exact cache. Up to the first position where the likeliest token is another, greedy decoding would have written
the same text, so that position needs no second generation.
Shapes: T tokens of a continuation, V vocabulary.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.evaluate.forcing import ForcedSample, hasty_policy, measuring_policy, room
from witcert_core.evaluate.offline.engine import OfflineEngine
from witcert_core.evaluate.offline.model import LoadedModel, Prompt, prompt_ids, text_ids
from witcert_core.evaluate.records import meter_of
from witcert_core.evaluate.settings import QuantizerSpec
from witcert_core.evaluate.stats import mean_interval
from witcert_core.evaluate.tables import interval
from witcert_core.report.text import percent_down

SCHEMA = "witcert.drift/1"
DRIFT_COLUMNS = (
    "KV cache",
    "KL to exact",
    "largest",
    "same likeliest token",
    "log-perplexity",
    "above exact",
    "texts unchanged",
    "tokens before the first change",
    "certified",
)


@dataclass(frozen=True)
class Texts:
    """What goes through the caches. generated: the answers are the exact cache's own, so that texts can part."""

    samples: Sequence[ForcedSample]
    generated: bool
    about: Mapping[str, Any]


def natural_text() -> str:
    """The documentation that comes with Python, as prose of about 465,000 characters; its words are of that version."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def read_text(path: Path) -> str:
    """A text; InputError for what is none."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"{path}: cannot be read: {reason}") from error


def windows(tokenizer: Any, text: str, name: str, *, count: int, context: int, tokens: int) -> Texts:
    """`count` windows spread evenly over `text`, each `context` tokens that are read exactly and `tokens` after them.

    Raises:
        InputError: a text of fewer tokens than one window.
    """
    special = prompt_ids(tokenizer, "", name, chat=False)
    ids, size = text_ids(tokenizer, text), context + tokens
    fitting = len(ids) // size
    if not fitting:
        raise InputError(
            f"{name} has {len(ids)} tokens, and one window takes {size}; take a longer text or smaller windows"
        )
    chosen = [i * fitting // count for i in range(count)] if fitting > count else range(fitting)
    starts = [place * size for place in chosen]
    samples = [ForcedSample("text", special + ids[at : at + context], ids[at + context : at + size]) for at in starts]
    about = {"text": name, "sha256": hashlib.sha256(text.encode()).hexdigest(), "context": context, "tokens": tokens}
    if name == NATURAL:
        about["python"] = platform.python_version()
    return Texts(samples, False, about)


NATURAL = "pydoc_data.topics"
"""Where `natural_text` is from."""


def answers(loaded: LoadedModel, prompts: Sequence[Prompt], name: str, tokens: int, spec: QuantizerSpec) -> Texts:
    """What greedy decoding from the exact cache writes after each prompt, up to `tokens` tokens.

    Raises:
        InputError: no answer has a second token, which is the first that is read from a cache.
    """
    ids = encode_all(loaded.tokenizer, prompts, name, chat=loaded.chat)
    longest = max(map(len, ids)) + tokens
    loaded.check_lengths([longest])
    engine = OfflineEngine(loaded, hasty_policy(spec, ()), longest)
    written = [engine.generate(f"prompt-{i}", one, tokens).ids for i, one in enumerate(ids)]
    samples = [ForcedSample("prompt", one, answer) for one, answer in zip(ids, written, strict=True) if len(answer) > 1]
    check_some(samples, name)
    about = {"prompts": name, "tokens": tokens, "chat": loaded.chat, "left_out": len(ids) - len(samples)}
    return Texts(samples, True, about)


def encode_all(tokenizer: Any, prompts: Sequence[Prompt], name: str, *, chat: bool) -> list[list[int]]:
    """Tokens of each prompt; InputError for one without any."""
    ids = [prompt_ids(tokenizer, prompt, name, chat=chat) for prompt in prompts]
    for number, one in enumerate(ids, 1):
        if not one:
            raise InputError(f"{name}: prompt {number} has no tokens; write a prompt or leave it out")
    return ids


def check_some(samples: Sequence[object], name: str) -> None:
    """InputError where no answer has a second token, the first that is read from a cache."""
    if not samples:
        raise InputError(f"{name}: the model ends every answer at its first token; nothing is read from a cache")


def drift(
    loaded: LoadedModel,
    specs: Sequence[QuantizerSpec],
    texts: Texts,
    options: Mapping[str, int],
    done: Callable[[], object] = lambda: None,
    stride: int = 1,
) -> dict[str, Any]:
    """Drift of each quantizer (schema witcert.drift/1); `done` is called after every sample. stride: of the meter."""
    size = room(texts.samples)
    loaded.check_lengths([size])
    exact = OfflineEngine(loaded, hasty_policy(specs[0], ()), size)
    policies = {spec.label: measuring_policy(spec, audit_every=0, stride=stride) for spec in specs}
    engines = {label: OfflineEngine(loaded, policy, size) for label, policy in policies.items()}
    found: dict[str, list[dict[str, Any]]] = {label: [] for label in engines}
    exact_nll = []
    for number, sample in enumerate(texts.samples):
        law, _ = _law(exact, sample, number)
        exact_nll.append(_nll(law, sample))
        for label, engine in engines.items():
            other, summary = _law(engine, sample, number)
            found[label].append({**compare_laws(law, other, sample.answer), "meter": meter_of(summary)})
        done()
    return {
        "schema": SCHEMA,
        "about": {"model": loaded.name, **texts.about, "samples": len(texts.samples), "seed": options["seed"]},
        "generated": texts.generated,
        "exact": {"nll": mean_interval(exact_nll, **options).as_dict()},
        "quantizers": {label: totals(rows, exact_nll, texts.generated, options) for label, rows in found.items()},
    }


def compare_laws(exact: Tensor, found: Tensor, answer: Sequence[int]) -> dict[str, Any]:
    """One sample; log probabilities [T, V] before each token of `answer`.

    kl: KL(exact || found), nats a token, mean and largest. top1: share of tokens where both have the same likeliest
    token. first_change: place of the first where they have not, None if there is none. The first token of an answer
    follows from the prompt's own pass, which reads exact keys, and is not counted in means.
    """
    p, q = exact[1:], found[1:]
    kl = (p.exp() * (p - q)).sum(-1).clamp(min=0.0)
    same = p.argmax(-1) == q.argmax(-1)
    changed = (~same).nonzero()
    return {
        "tokens": len(answer),
        "kl": float(kl.mean()),
        "kl_max": float(kl.max()),
        "top1": float(same.double().mean()),
        "first_change": int(changed[0]) + 1 if len(changed) else None,
        "nll": float(-q.gather(-1, torch.tensor(answer[1:])[:, None]).mean()),
    }


def totals(
    rows: Sequence[Mapping[str, Any]], exact_nll: Sequence[float], generated: bool, options: Mapping[str, int]
) -> dict[str, Any]:
    """Means over samples with bootstrap intervals, a sample being what is drawn; `samples` as they are.

    unchanged: share of texts that part nowhere; kept: tokens before they part, at most the whole text. None of texts
    that are given, which cannot part.
    """
    meters = [row["meter"] for row in rows]
    measured = sum(meter["cells_measured"] for meter in meters)
    kept = [row["tokens"] if row["first_change"] is None else row["first_change"] for row in rows]
    columns: dict[str, list[float]] = {name: [row[name] for row in rows] for name in ("kl", "top1", "nll")}
    columns["nll_increase"] = [row["nll"] - nll for row, nll in zip(rows, exact_nll, strict=True)]
    if generated:
        columns["unchanged"] = [float(row["first_change"] is None) for row in rows]
        columns["kept"] = [float(tokens) for tokens in kept]
    means = {name: mean_interval(values, **options).as_dict() for name, values in columns.items()}
    return {
        "unchanged": None,
        "kept": None,
        **means,
        "kl_max": max(row["kl_max"] for row in rows),
        "certified_share": sum(meter["tv_certified_cells"] for meter in meters) / measured if measured else None,
        "samples": list(rows),
    }


def drift_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """A line for the exact cache and one for each quantizer."""
    exact = ["exact", "", "", "", interval(found["exact"]["nll"]), "", "", "", ""]
    return [exact, *(_row(name, result) for name, result in found["quantizers"].items())]


def _row(name: str, result: Mapping[str, Any]) -> list[str]:
    return [
        name,
        interval(result["kl"]),
        f"{result['kl_max']:.3f}",
        interval(result["top1"]),
        interval(result["nll"]),
        interval(result["nll_increase"], signed=True),
        interval(result["unchanged"]),
        interval(result["kept"]),
        percent_down(result["certified_share"]),
    ]


def _law(engine: OfflineEngine, sample: ForcedSample, number: int) -> tuple[Tensor, dict[str, Any]]:
    """Log probabilities [T, V] float64 before each token of the answer, and the request's summary."""
    logits, summary = engine.force(f"sample-{number}", sample.prompt, sample.answer)
    return torch.log_softmax(logits.double(), -1), summary


def _nll(law: Tensor, sample: ForcedSample) -> float:
    return float(-law[1:].gather(-1, torch.tensor(sample.answer[1:])[:, None]).mean())
