"""`witcert eval risk`: which statistic of a request's meter says best how far its text drifts.

Every request is an answer that greedy decoding writes from the exact cache, fed through each quantized one. Statistics
are compared, and the curve from the score's own to a probability is fitted, on every second request; what is reported
of the score is measured on the others.
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
from witcert_core.evaluate.stats import Interval, auroc, bootstrap, spearman
from witcert_core.report.risk import STATISTIC

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
                    "risk": summary["risk"],
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
    return {"within": python_statistics.fmean(inside) if inside else 0.0, "across": _correlation(rows, name)}


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
    return {
        "requests": len(rows),
        "changed": sum(row["changed"] for row in rows),
        "needles": len(needles),
        "lost": sum(row["changed"] for row in needles),
        "kl": _interval(rows, name, "kl", spearman, options),
        "auroc_changed": _interval(rows, name, "changed", auroc, options),
        "auroc_lost": _interval(needles, name, "changed", auroc, options),
    }


def fit_curve(values: Sequence[float], changed: Sequence[bool]) -> dict[str, float] | None:
    """`half`, `power` of P(changed) = x^power / (x^power + half^power), by most likelihood; a little pulled to power 1.
    None where texts change less the larger x is: there is no score in it.

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
        return None
    return {"half": float(torch.tensor(-offset / power, dtype=torch.float64).exp()), "power": power}


def analyse(rows: Sequence[Mapping[str, Any]], options: Mapping[str, int]) -> dict[str, Any]:
    """Schema witcert.risk/1, without `about`: each statistic on both halves, and what the score is worth on the second.

    no_better_than_chance: caches within which the interval of its rank correlation with KL holds 0, or that harm all
    requests alike.
    """
    first, second = split(rows)
    if not first or not second:
        raise InputError(f"{len(rows)} measured requests cannot be halved; take more samples")
    choice = choose(first)
    groups = {label: group for label, group in grouped(second).items() if len(group) >= FEWEST}
    reports = {label: report(group, STATISTIC, options) for label, group in groups.items()}
    return {
        "schema": SCHEMA,
        "statistic": STATISTIC,
        "best": next(iter(choice)),
        "curve": fit_curve(_values(first, STATISTIC), [row["changed"] for row in first]),
        "candidates": {
            name: {"chosen_on": x, "reported": within_and_across(second, name)} for name, x in choice.items()
        },
        "violations": sum(row["violations"] for row in rows),
        "quantizers": reports,
        "no_better_than_chance": [label for label, x in reports.items() if x["kl"] is None or x["kl"]["low"] <= 0],
        "truth": {label: report(group, TRUTH, options) for label, group in groups.items()},
        "across": report(second, STATISTIC, options),
        "across_truth": report(second, TRUTH, options),
    }


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [row["statistics"][name] for row in rows]


def _correlation(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """0 where one of both is the same of all requests: that ranks nothing."""
    kl = torch.tensor([row["kl"] for row in rows], dtype=torch.float64)
    value = float(spearman(torch.tensor(_values(rows, name), dtype=torch.float64), kl))
    return 0.0 if value != value else value


def _interval(
    rows: Sequence[Mapping[str, Any]],
    name: str,
    against: str,
    statistic: Callable[[Tensor, Tensor], Tensor],
    options: Mapping[str, int],
) -> dict[str, float | int] | None:
    """`statistic` of a candidate and of what became of the requests, with its interval; None where it does not exist.

    Requests are drawn, each with all the caches it went through: the rows of one request are not independent.
    """
    by_request: dict[tuple[Any, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_request.setdefault((row.get("model"), row["request"]), []).append(row)
    most = max((len(own) for own in by_request.values()), default=0)
    whole = [own for own in by_request.values() if len(own) == most]  # in others some cache had nothing quantized
    if not whole:
        return None
    x = torch.tensor([_values(own, name) for own in whole], dtype=torch.float64)
    y = torch.tensor([[float(row[against]) for row in own] for own in whole], dtype=torch.float64)
    value = float(statistic(x.flatten(), y.flatten()))
    if value != value:
        return None

    def drawn(*columns: Tensor) -> Tensor:
        return statistic(torch.cat(columns[:most], -1), torch.cat(columns[most:], -1))

    low, high = bootstrap([*x.unbind(-1), *y.unbind(-1)], drawn, **options)
    return Interval(value, low, high, x.numel()).as_dict()
