"""Needle accuracy in SGLang on the outlier twin, raw and gated, against an exact cache; coverage on the original.

The same questions for every server, so differences are paired.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from witcert_demo.run import ask
from witcert_demo.servers import running_server
from witcert_demo.tally import Asked
from witcert_demo.tasks import Sample, make_samples

from witcert_core.evaluate.stats import mean_interval, paired_difference
from witcert_core.quantizers import REGISTRY

TASKS = ("single_needle", "multi_key", "variable_tracking")
TAU = 0.2
EXACT = "none"


def samples(per_task: int, num_tokens: int) -> list[Sample]:
    return [sample for task in TASKS for sample in make_samples(task, num_tokens, per_task, seed=61)]


def ask_all(model: Path, work: Path, name: str, policy: dict[str, Any], asked: list[Sample]) -> list[Asked]:
    path = work / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"version": 1, **policy}))
    options = ["--dtype", "float32", "--disable-radix-cache"]
    log = work / f"{name}.log"
    with running_server(model, policy=path, log=log, options=options) as server, ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda sample: ask(server, sample), asked))


def rights(answers: list[Asked]) -> list[float]:
    return [float(answer.right) for answer in answers]


def total(answers: list[Asked], *keys: str) -> int:
    """Sum of one entry of the summaries."""
    found = 0
    for answer in answers:
        entry: Any = answer.summary
        for key in keys:
            entry = entry[key]
        found += int(entry)
    return found


def on_the_twin(twin: Path, work: Path, per_task: int, num_tokens: int) -> list[dict[str, Any]]:
    """A row a quantizer: accuracy raw and gated, paired differences to exact, blocks and bytes the gate moved."""
    asked = samples(per_task, num_tokens)
    exact = rights(ask_all(twin, work, EXACT, {"quantizer": {"name": EXACT}}, asked))
    rows = [{"quantizer": "none (exact)", "raw": mean_interval(exact).as_dict()}]
    for name in REGISTRY.from_package("witcert_core"):
        # The engine's own cache is quantized by a flag that a CPU refuses; outliers in 16 bit need a 16-bit model.
        if name in (EXACT, "engine", "int8_dither_bypass"):
            continue
        quantizer, meter = {"name": name}, {"audit_every": 4}
        observed = ask_all(twin, work, f"{name}-raw", {"quantizer": quantizer, "meter": {**meter, "stride": 1}}, asked)
        gated_policy = {"quantizer": quantizer, "meter": meter, "gate": {"kind": "combined"}}
        gated = ask_all(twin, work, f"{name}-gated", gated_policy, asked)
        measured = total(observed, "cells_measured")
        rows.append(
            {
                "quantizer": name,
                "raw": mean_interval(rights(observed)).as_dict(),
                "gated": mean_interval(rights(gated)).as_dict(),
                "raw_minus_exact": paired_difference(rights(observed), exact).as_dict(),
                "gated_minus_exact": paired_difference(rights(gated), exact).as_dict(),
                "certified_raw": total(observed, "certified_cells") / measured,
                "repaired_blocks": total(gated, "gate", "repaired_blocks") / len(asked),
                "repaired_bytes": total(gated, "gate", "bytes") / len(asked),
                "audited": total(observed, "audit", "cells") + total(gated, "audit", "cells"),
                "violations": total(observed, "audit", "violations") + total(gated, "audit", "violations"),
            }
        )
    return rows


def on_the_original(model: Path, work: Path, per_task: int, num_tokens: int) -> list[dict[str, Any]]:
    """Share of cells certified at tau for the INT8 quantizers: a meter stuck at 1 would show nothing here."""
    rows = []
    for name in ("int8_token_group", "int8_dither", "int8_dither_w"):
        policy = {"quantizer": {"name": name}, "meter": {"stride": 1, "audit_every": 4}}
        answers = ask_all(model, work, f"{name}-original", policy, samples(per_task, num_tokens))
        measured = total(answers, "cells_measured")
        beside = [answer.summary["tier_w_beside"] for answer in answers if answer.summary is not None]
        any_query = total(answers, "certified_cells")
        if all(beside):
            any_query = sum(b["certified_cells"] for b in beside)
        rows.append(
            {
                "quantizer": name,
                "raw": mean_interval(rights(answers)).as_dict(),
                "certified": total(answers, "certified_cells") / measured,
                "certified_any_query": any_query / measured,
                "violations": total(answers, "audit", "violations"),
            }
        )
    return rows
