"""Known answers fed through a quantized cache: what was lost, and every cell on the way.

Shapes: T answer tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.evaluate.cells import WITNESS, CellTable, FormProbe
from witcert_core.evaluate.offline.engine import OfflineEngine
from witcert_core.evaluate.offline.model import LoadedModel
from witcert_core.evaluate.settings import QuantizerSpec, base_settings, build_policy
from witcert_core.evaluate.tasks import EvalSample, TaskSource
from witcert_core.policy.model import Policy

_EVERY_ROW = 2**20


@dataclass(frozen=True)
class ForcedSample:
    """A prompt and its answer as token ids."""

    task: str
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Forced:
    """Of one sample: mean negative log likelihood of the answer's tokens, and whether greedy decoding writes it."""

    nll: float
    right: bool
    log_probs: Tensor  # [T, V]


def forced_samples(
    loaded: LoadedModel, source: TaskSource, tasks: Sequence[str], lengths: Sequence[int], count: int, seed: int
) -> list[ForcedSample]:
    """`count` samples of every task at every length."""
    made: list[EvalSample] = []
    for task in tasks:
        for length in lengths:
            made += source.samples(task, length, count, seed, loaded.tokenizer)
    return [ForcedSample(s.task, loaded.prompt_ids(s.prompt), loaded.answer_ids(s.answer)) for s in made]


def room(samples: Iterable[ForcedSample]) -> int:
    """Slots that the longest sample needs."""
    return max(len(sample.prompt) + len(sample.answer) for sample in samples)


def force(engine: OfflineEngine, sample: ForcedSample, request_id: str) -> Forced:
    """The answer's likelihood given the prompt, its tokens reading what is stored."""
    logits, _ = engine.force(request_id, sample.prompt, sample.answer)
    log_probs = torch.log_softmax(logits.double(), -1)
    target = torch.tensor(sample.answer)
    nll = -log_probs.gather(-1, target[:, None]).mean()
    return Forced(float(nll), bool((logits.argmax(-1) == target).all()), log_probs)


def measuring_policy(spec: QuantizerSpec, audit_every: int = 1, stride: int = 1) -> Policy:
    """Every `stride`-th row of an answer metered, and of these every `audit_every`-th audited, none of 0."""
    base = base_settings(None, stride=stride, audit_every=audit_every)
    base["meter"]["max_rows"] = _EVERY_ROW
    return build_policy(base, spec, "raw")


def hasty_policy(spec: QuantizerSpec, layers: tuple[int, ...] | None) -> Policy:
    """As little metered as a policy allows, for runs that only look at answers; `layers` are quantized."""
    base = {"version": 1, "meter": {"stride": _EVERY_ROW, "max_rows": 1, "layers": [0]}}
    return build_policy(base, spec, "exact" if layers == () else "raw", layers)


def deltas_of(spec: QuantizerSpec, deltas: Sequence[float]) -> tuple[float, ...]:
    """The deterministic tier and, where the law of a dither bounds the error, the failure probabilities asked for."""
    return (WITNESS, *(deltas if measuring_policy(spec).tier == "probabilistic" else ()))


def collect(
    loaded: LoadedModel, spec: QuantizerSpec, samples: Sequence[ForcedSample], deltas: Sequence[float]
) -> tuple[CellTable, list[Forced]]:
    """All cells and the outcome of every sample."""
    size = room(samples)
    probe = FormProbe(loaded.shape, deltas_of(spec, deltas))
    engine = OfflineEngine(loaded, measuring_policy(spec), size, probe)
    outcomes = []
    for number, sample in enumerate(samples):
        probe.sample = number
        outcomes.append(force(engine, sample, f"sample-{number}"))
    return probe.table(), outcomes
