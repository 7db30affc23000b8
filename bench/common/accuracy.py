"""Needle accuracy on the outlier twin, raw and gated, against an exact cache; coverage on the original.

The same questions for every quantizer and engine, so differences are paired.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from witcert_demo.tally import Asked
from witcert_demo.tasks import Sample, make_samples

from witcert_core.evaluate.stats import mean_interval, paired_difference
from witcert_core.quantizers import REGISTRY

TASKS = ("single_needle", "multi_key", "variable_tracking")
EXACT = "none"
LEFT_OUT = (EXACT, "engine")
"""The engine's own cache is quantized by a flag, not by a policy."""
SIXTEEN_BIT = ("int8_dither_bypass",)
"""Outliers in 16 bit need a 16-bit model (compared with an exact cache of it) and a packed cache beside them."""

AskAll = Callable[[str, dict[str, Any], Sequence[Sample]], list[Asked]]
"""(name of the run, policy without its version, questions) -> an engine's answers, in order."""


def samples(per_task: int, num_tokens: int) -> list[Sample]:
    return [sample for task in TASKS for sample in make_samples(task, num_tokens, per_task, seed=61)]


def rights(answers: Sequence[Asked]) -> list[float]:
    return [float(answer.right) for answer in answers]


def total(answers: Sequence[Asked], *keys: str) -> int:
    """Sum of one entry of the summaries."""
    found = 0
    for answer in answers:
        entry: Any = answer.summary
        for key in keys:
            entry = entry[key]
        found += int(entry)
    return found


def on_the_twin(ask_all: AskAll, ask_all_16: AskAll, asked: Sequence[Sample]) -> list[dict[str, Any]]:
    """A row a built-in quantizer: accuracy raw and gated, paired differences to exact, blocks and bytes moved.

    ask_all_16: of the model in bfloat16.
    """
    wide = [name for name in REGISTRY.from_package("witcert_core") if name not in (*LEFT_OUT, *SIXTEEN_BIT)]
    return [
        *compared(ask_all, wide, asked, "none (exact)"),
        *compared(ask_all_16, SIXTEEN_BIT, asked, "none (exact, bfloat16)", "-bfloat16", storage="packed"),
    ]


def compared(
    ask_all: AskAll,
    names: Sequence[str],
    asked: Sequence[Sample],
    label: str,
    suffix: str = "",
    storage: str = "simulated",
) -> list[dict[str, Any]]:
    """The row of an exact cache, called `label`, and those of quantizers; suffix: of the exact run's name."""
    exact = rights(ask_all(EXACT + suffix, {"quantizer": {"name": EXACT}}, asked))
    rows: list[dict[str, Any]] = [{"quantizer": label, "raw": mean_interval(exact).as_dict()}]
    for name in names:
        quantizer, meter = {"name": name, "storage": storage}, {"audit_every": 4}
        observed = ask_all(f"{name}-raw", {"quantizer": quantizer, "meter": {**meter, "stride": 1}}, asked)
        gated = ask_all(f"{name}-gated", {"quantizer": quantizer, "meter": meter, "gate": {"kind": "combined"}}, asked)
        rows.append(
            {
                "quantizer": name,
                "raw": mean_interval(rights(observed)).as_dict(),
                "gated": mean_interval(rights(gated)).as_dict(),
                "raw_minus_exact": paired_difference(rights(observed), exact).as_dict(),
                "gated_minus_exact": paired_difference(rights(gated), exact).as_dict(),
                "certified_raw": total(observed, "tv_certified_cells") / total(observed, "cells_measured"),
                "repaired_blocks": total(gated, "gate", "repaired_blocks") / len(asked),
                "repaired_bytes": total(gated, "gate", "bytes") / len(asked),
                "audited": total(observed, "audit", "cells") + total(gated, "audit", "cells"),
                "violations": sum(
                    total(kind, "audit", fault) for kind in (observed, gated) for fault in ("violations", "mismatches")
                ),
            }
        )
    return rows


def on_the_original(ask_all: AskAll, asked: Sequence[Sample]) -> list[dict[str, Any]]:
    """Share of cells certified at tau for the INT8 quantizers: a meter stuck at 1 would show nothing here."""
    rows = []
    for name in ("int8_token_group", "int8_dither", "int8_dither_w"):
        policy = {"quantizer": {"name": name}, "meter": {"stride": 1, "audit_every": 4}}
        answers = ask_all(f"{name}-original", policy, asked)
        measured = total(answers, "cells_measured")
        beside = [answer.summary["deterministic_beside"] for answer in answers if answer.summary is not None]
        any_query = total(answers, "tv_certified_cells")
        if all(beside):
            any_query = sum(b["tv_certified_cells"] for b in beside)
        rows.append(
            {
                "quantizer": name,
                "raw": mean_interval(rights(answers)).as_dict(),
                "certified": total(answers, "tv_certified_cells") / measured,
                "certified_any_query": any_query / measured,
                "violations": total(answers, "audit", "violations") + total(answers, "audit", "mismatches"),
            }
        )
    return rows
