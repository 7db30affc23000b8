"""`witcert eval risk`: which statistic of a request's meter says best how far its text drifts.

Every request is an answer that greedy decoding writes from the exact cache, fed through each quantized one. The
statistic, and the curve from it to a probability, are chosen on every second request; what is reported of them is
measured on the others.
Shapes: N requests, R resamples.
"""

from __future__ import annotations

import statistics as python_statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.evaluate.drift import compare_laws
from witcert_core.evaluate.forcing import ForcedSample, hasty_policy, measuring_policy, room
from witcert_core.evaluate.offline.engine import OfflineEngine
from witcert_core.evaluate.offline.model import LoadedModel
from witcert_core.evaluate.settings import QuantizerSpec
from witcert_core.evaluate.statistics import TRUTH, observing
from witcert_core.evaluate.stats import Interval, auroc_interval, bootstrap, spearman

SCHEMA = "witcert.risk/1"
STRIDE = 4
"""Every so many rows are metered, as in a server: a score has to be good enough with a part of them."""
FEWEST = 8
"""Requests of a quantizer below which no correlation is told."""


@dataclass(frozen=True)
class Request:
    """An answer of the exact cache. needle: it is right, so that a text which parts has lost what was asked for."""

    sample: ForcedSample
    needle: bool


def requests_of(
    loaded: LoadedModel, spec: QuantizerSpec, prose: Sequence[ForcedSample], needles: Sequence[ForcedSample]
) -> list[Request]:
    """prose: windows, whose tokens are written anew by the exact cache; needles: those of them it answers right."""
    size = room([*prose, *needles])
    engine = OfflineEngine(loaded, hasty_policy(spec, ()), size)
    found = []
    for number, sample in enumerate(prose):
        ids = engine.generate(f"prose-{number}", sample.prompt, len(sample.answer)).ids
        if len(ids) > 1:
            found.append(Request(ForcedSample(sample.task, sample.prompt, ids), False))
    for number, sample in enumerate(needles):
        logits, _ = engine.force(f"needle-{number}", sample.prompt, sample.answer)
        if logits.argmax(-1).tolist() == sample.answer:
            found.append(Request(sample, True))
    if not found:
        raise InputError("the model writes no answer of two tokens from its exact cache: there is nothing to rank")
    return found


def measure(
    loaded: LoadedModel,
    specs: Sequence[QuantizerSpec],
    requests: Sequence[Request],
    done: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """One row a request and quantizer: what became of it and every statistic; `done` is called after each request."""
    size = room([request.sample for request in requests])
    exact = OfflineEngine(loaded, hasty_policy(specs[0], ()), size)
    with observing() as cells:
        engines = {spec.label: OfflineEngine(loaded, measuring_policy(spec, stride=STRIDE), size) for spec in specs}
    rows = []
    for number, request in enumerate(requests):
        sample, name = request.sample, f"request-{number}"
        law = torch.log_softmax(exact.force(name, sample.prompt, sample.answer)[0].double(), -1)
        for label, engine in engines.items():
            logits, summary = engine.force(name, sample.prompt, sample.answer)
            found = compare_laws(law, torch.log_softmax(logits.double(), -1), sample.answer)
            rows.append(
                {
                    "request": number,
                    "quantizer": label,
                    "needle": request.needle,
                    "kl": found["kl"],
                    "changed": found["first_change"] is not None,
                    "violations": summary["audit"]["violations"],
                    "statistics": cells.take(name),
                }
            )
        done()
    return rows


def split(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Rows to choose on and rows to report, request by request, so that no request is on both sides."""
    some = [row for row in rows if row["statistics"]]
    return [row for row in some if row["request"] % 2 == 0], [row for row in some if row["request"] % 2]


def candidates(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Statistics that every row has, the truth left out."""
    shared = set.intersection(*(set(row["statistics"]) for row in rows))
    return [name for name in rows[0]["statistics"] if name in shared and name != TRUTH]


def within_and_across(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    """Rank correlation of a statistic with KL: mean of that within each group, and over all rows."""
    inside = [_correlation(group, name) for group in grouped(rows).values() if len(group) >= FEWEST]
    some = [x for x in inside if x == x]
    return {"within": python_statistics.fmean(some) if some else 0.0, "across": _correlation(rows, name)}


def grouped(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """By model, where rows have one, and quantizer."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(" ".join(filter(None, (row.get("model"), row["quantizer"]))), []).append(row)
    return groups


def choose(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Every candidate, best first: by the mean of its rank correlations within and across quantizers."""
    found = {name: within_and_across(rows, name) for name in candidates(rows)}
    return dict(sorted(found.items(), key=lambda item: -(item[1]["within"] + item[1]["across"])))


def report(rows: Sequence[Mapping[str, Any]], name: str, options: Mapping[str, int]) -> dict[str, Any]:
    """Of one statistic: rank correlation with KL, AUROC of changed texts and of lost needles, with intervals; None
    where there is nothing to tell apart."""
    needles = [row for row in rows if row["needle"]]
    ranks = _correlation_interval(rows, name, options)
    changed = auroc_interval(_values(rows, name), [row["changed"] for row in rows], **options)
    lost = auroc_interval(_values(needles, name), [row["changed"] for row in needles], **options) if needles else None
    return {
        "requests": len(rows),
        "changed": sum(row["changed"] for row in rows),
        "needles": len(needles),
        "lost": sum(row["changed"] for row in needles),
        "kl": None if ranks is None else ranks.as_dict(),
        "auroc_changed": None if changed is None else changed.as_dict(),
        "auroc_lost": None if lost is None else lost.as_dict(),
    }


def fit_curve(values: Sequence[float], changed: Sequence[bool]) -> dict[str, float]:
    """`half`, `power` of P(changed) = x^power / (x^power + half^power), by most likelihood; a little pulled to power 1.

    That is a logistic curve in log x (Platt 1999); Newton's method on its two coefficients.
    """
    x = torch.tensor(list(values), dtype=torch.float64).clamp(min=1e-9).log()
    y = torch.tensor([float(c) for c in changed], dtype=torch.float64)
    design = torch.stack([torch.ones_like(x), x], -1)
    coefficients = torch.tensor([0.0, 1.0], dtype=torch.float64)
    prior = torch.tensor([0.0, 1.0], dtype=torch.float64)
    pull = torch.diag(torch.tensor([1e-3, 1e-1], dtype=torch.float64))
    for _ in range(100):
        p = torch.sigmoid(design @ coefficients)
        gradient = design.T @ (y - p) - pull @ (coefficients - prior)
        hessian = design.T @ (design * (p * (1 - p))[:, None]) + pull
        step = torch.linalg.solve(hessian, gradient)
        coefficients = coefficients + step.clamp(-1.0, 1.0)
        if float(step.abs().max()) < 1e-10:
            break
    offset, power = coefficients.tolist()
    if power <= 0:
        raise InputError("the chosen statistic falls where texts change: there is no score in it")
    return {"half": float(torch.tensor(-offset / power, dtype=torch.float64).exp()), "power": power}


def analyse(rows: Sequence[Mapping[str, Any]], options: Mapping[str, int]) -> dict[str, Any]:
    """The choice on one half, and what it is worth on the other (schema witcert.risk/1, without `about`)."""
    first, second = split(rows)
    if not first or not second:
        raise InputError(f"{len(rows)} measured requests cannot be halved; take more samples")
    choice = choose(first)
    name = next(iter(choice))
    groups = {label: group for label, group in grouped(second).items() if len(group) >= FEWEST}
    return {
        "schema": SCHEMA,
        "statistic": name,
        "curve": fit_curve(_values(first, name), [row["changed"] for row in first]),
        "candidates": {c: {"chosen_on": x, "reported": within_and_across(second, c)} for c, x in choice.items()},
        "violations": sum(row["violations"] for row in rows),
        "quantizers": {label: report(group, name, options) for label, group in groups.items()},
        "truth": {label: report(group, TRUTH, options) for label, group in groups.items()},
        "across": report(second, name, options),
        "across_truth": report(second, TRUTH, options),
    }


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [row["statistics"][name] for row in rows]


def _columns(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[Tensor, Tensor]:
    kl = torch.tensor([row["kl"] for row in rows], dtype=torch.float64)
    return torch.tensor(_values(rows, name), dtype=torch.float64), kl


def _correlation(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(spearman(*_columns(rows, name)))


def _correlation_interval(rows: Sequence[Mapping[str, Any]], name: str, options: Mapping[str, int]) -> Interval | None:
    """None where one of both is the same of all requests."""
    columns = _columns(rows, name)
    value = float(spearman(*columns))
    return None if value != value else Interval(value, *bootstrap(columns, spearman, **options), len(rows))
