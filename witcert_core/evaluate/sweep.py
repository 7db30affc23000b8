"""`witcert eval layers`: contaminate one layer at a time, then all of them, then growing runs from either end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from witcert_core.evaluate.forcing import Forced, ForcedSample, force, hasty_policy, room
from witcert_core.evaluate.offline.engine import OfflineEngine
from witcert_core.evaluate.offline.model import LoadedModel
from witcert_core.evaluate.plots import figure
from witcert_core.evaluate.settings import QuantizerSpec
from witcert_core.evaluate.stats import mean_interval
from witcert_core.evaluate.tables import interval

SCHEMA = "witcert.sweep/1"


@dataclass(frozen=True)
class Setting:
    """Which layers read a quantized cache. kind: `only`, `all`, `prefix` or `suffix`."""

    kind: str
    layers: tuple[int, ...]

    @property
    def name(self) -> str:
        if self.kind == "only":
            return f"layer {self.layers[0]} only"
        return self.kind if self.kind == "all" else f"layers {self.layers[0]}-{self.layers[-1]}"


def settings(num_layers: int) -> list[Setting]:
    """One layer at a time, then all, then runs of 2 layers and more from the first and from the last one."""
    every = tuple(range(num_layers))
    singles = [Setting("only", (layer,)) for layer in every]
    prefixes = [Setting("prefix", every[:count]) for count in range(2, num_layers)]
    suffixes = [Setting("suffix", every[-count:]) for count in range(2, num_layers)]
    return [*singles, Setting("all", every), *prefixes, *suffixes]


def sweep(
    loaded: LoadedModel,
    spec: QuantizerSpec,
    samples: Sequence[ForcedSample],
    options: Mapping[str, int],
    done: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Loss of each setting against the exact cache on the same samples; `done` is called after each setting.

    lost: answers greedy decoding writes from the exact cache and not from this one. nll_increase: of the answer, nats
    a token. kl: mean over the answer's tokens of KL(exact || quantized), nats.
    """
    exact = _forced(loaded, spec, (), samples)
    done()
    rows = []
    for setting in settings(len(loaded.shape.layers)):
        found = _forced(loaded, spec, setting.layers, samples)
        lost = [float(a.right and not b.right) for a, b in zip(exact, found, strict=True)]
        nll = [b.nll - a.nll for a, b in zip(exact, found, strict=True)]
        kl = [divergence(a, b) for a, b in zip(exact, found, strict=True)]
        rows.append(
            {
                "setting": setting.name,
                "kind": setting.kind,
                "layers": list(setting.layers),
                "lost": mean_interval(lost, **options).as_dict(),
                "nll_increase": mean_interval(nll, **options).as_dict(),
                "kl": mean_interval(kl, **options).as_dict(),
            }
        )
        done()
    right = sum(outcome.right for outcome in exact)
    return {"exact_right": right, "samples": len(samples), "rows": rows, "cancellation": cancellation(rows)}


def divergence(exact: Forced, found: Forced) -> float:
    """Mean KL(exact || found) over the answer's tokens, nats."""
    p = exact.log_probs
    return float((p.exp() * (p - found.log_probs)).sum(-1).mean().clamp(min=0.0))


def cancellation(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Loss with all layers together beside the sum of what each does alone: smaller, and errors cancel."""
    alone = [row for row in rows if row["kind"] == "only"]
    (together,) = [row for row in rows if row["kind"] == "all"]
    return {
        name: {"sum_of_single": sum(row[name]["value"] for row in alone), "all": together[name]["value"]}
        for name in ("lost", "nll_increase", "kl")
    }


def _forced(
    loaded: LoadedModel, spec: QuantizerSpec, layers: tuple[int, ...], samples: Sequence[ForcedSample]
) -> list[Forced]:
    engine = OfflineEngine(loaded, hasty_policy(spec, layers), room(samples))
    with torch.no_grad():
        return [force(engine, sample, f"sample-{i}") for i, sample in enumerate(samples)]


SWEEP_COLUMNS = ("quantized", "answers lost", "NLL increase", "KL")


def sweep_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """A line a setting."""
    names = ("lost", "nll_increase", "kl")
    return [[row["setting"], *(interval(row[name]) for name in names)] for row in result["rows"]]


def plot_sweep(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Answers lost and KL: one layer at a time, and runs of layers from either end, a column a quantizer."""
    with figure(path, columns=len(results), rows=2, size=(3.8, 2.4)) as axes:
        for column, (name, result) in enumerate(results.items()):
            for ax, measure in zip((row[column] for row in axes), ("lost", "kl"), strict=True):
                _draw(ax, result["rows"], measure)
            axes[0][column].set_title(name)
            axes[1][column].set_xlabel("layer, or the run's other end")
        axes[0][0].set_ylabel("answers lost")
        axes[1][0].set_ylabel("KL, nats")
        axes[0][0].legend()


def _draw(ax: Any, rows: Sequence[Mapping[str, Any]], measure: str) -> None:
    alone, prefixes, suffixes, every = (
        [row for row in rows if row["kind"] == kind] for kind in ("only", "prefix", "suffix", "all")
    )
    for part, title, colour, end in (
        (alone, "this layer only", "#2471a3", 0),
        ([alone[0], *prefixes, *every], "all up to this one", "#c0392b", -1),
        ([alone[-1], *suffixes, *every], "all from this one on", "#1e8449", 0),
    ):
        x = [row["layers"][end] for row in part]
        found = [row[measure] for row in part]
        y = [interval["value"] for interval in found]
        error = [[i["value"] - i["low"] for i in found], [i["high"] - i["value"] for i in found]]
        ax.errorbar(x, y, yerr=error, fmt="o-", color=colour, capsize=2, label=title)
    ax.set_xticks([row["layers"][0] for row in alone][:: max(1, len(alone) // 8)])
    if measure == "lost":
        ax.set_ylim(-0.03, 1.05)
