"""The tables of one section each, rendered from its result: of a model, real or small.

Every table says how many samples it rests on; intervals are 95 % bootstrap percentiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.published import FIGURES_OF_PAPERS
from witcert_core.evaluate import coverage, risk_run, sweep, trust
from witcert_core.evaluate.tables import interval, markdown_table
from witcert_core.meter.bounds import FORM_NAMES
from witcert_core.report.text import format_bytes, percent_down

LEAST_TV_SHOWN = 1e-3
MOST_SETTINGS = 40
"""A sweep of more is shown by its extremes and some runs of layers; all of it is in the picture and in the JSON."""
LAYERS_SHOWN = 4

Result = Mapping[str, Any]


def asked(about: Result) -> str:
    """How many samples of what, in words."""
    return f"{about['samples']} samples of each of {', '.join(f'`{task}`' for task in about['tasks'])}"


def gates_block(found: Result) -> str:
    columns = ["KV cache", "mode", "score", "zero", "minus exact", "certified, any query", "violations"]
    columns += ["repaired blocks a sample", "page-in in all"]
    rows = []
    for row in found["rows"]:
        meter, repairs = row["meter"], row["repairs"]
        rows.append(
            [
                row["quantizer"],
                row["mode"],
                interval(row["score"]),
                f"{row['zero_scores']} of {row['score']['count']}",
                interval(row["minus_exact"], signed=True),
                percent_down(meter["tv_certified_any_query_share"]),
                f"{meter['violations']} of {meter['audited']}",
                "-" if repairs is None else f"{repairs['blocks_median']:g} (most {repairs['blocks_max']})",
                "-" if repairs is None else format_bytes(repairs["bytes_total"]),
            ]
        )
    return markdown_table(columns, rows)


def ruler_block(found: Result) -> str:
    """A line a model, length and cache; below, the score of each family from the exact cache."""
    rows, families = [], []
    for name, run in found["runs"].items():
        model, length = name.split()
        for row in run["rows"]:
            meter = row["meter"]
            if row["mode"] == "exact":
                scores = ", ".join(f"`{cell['task']}` {cell['score']['value']:.2f}" for cell in row["cells"])
                families.append(f"{model}, {length} tokens: {scores}")
            rows.append(
                [
                    model,
                    length,
                    "exact" if row["mode"] == "exact" else row["quantizer"],
                    interval(row["score"]),
                    interval(row["minus_exact"], signed=True),
                    "-" if row["mode"] == "exact" else percent_down(meter["tv_certified_any_query_share"]),
                    f"{meter['violations']} of {meter['audited']}",
                    str(row["score"]["count"]),
                ]
            )
    columns = ("model", "tokens", "KV cache", "score", "minus exact", "certified, any query", "violations", "questions")
    return f"{markdown_table(columns, rows)}\n\nBy family, exact cache: {'; '.join(families)}."


def coverage_block(found: Result) -> str:
    columns = ("model", *coverage.COVERAGE_COLUMNS)
    names = ("original", "twin")
    rows = [[name, *row] for name in names for row in coverage.coverage_rows(found[name]["quantizers"])]
    tight = found["original"]["quantizers"]["int8_dither"]["over_extremal"]["0.01"]
    said = ", ".join(f"`{form}` {tight[form]['median']:.2f}" for form in (*FORM_NAMES, "meter"))
    measured = found["twin"]["quantizers"]["int8_dither"]
    twin = measured["at_tau"]
    certain = twin["deterministic"]
    return (
        f"{markdown_table(columns, rows)}\n\n"
        f"On the twin's `int8_dither` cache the published form certifies {percent_down(twin['0.01']['eform'])} of the "
        f"cells at δ = 0.01, the meter {percent_down(twin['0.01']['meter'])} on the same radii; for any query "
        f"{percent_down(certain['eform'])} and {percent_down(certain['meter'])}. Median of each bound "
        f"over `extremal`, original model, δ = 0.01: {said}. Each share is of {measured['cells']:,} cells: "
        f"{asked(found['twin']['about'])}."
    )


def trust_block(found: Result) -> str:
    parts = [markdown_table(trust.TRUST_COLUMNS, trust.trust_rows(found))]
    rows = []
    for name, result in found["quantizers"].items():
        for row in result["looseness"]:
            if row["cells"] and row["tv_above"] >= LEAST_TV_SHOWN:
                ratio = row["ratio"]
                shown = "-" if ratio is None else " / ".join(f"{x:.3g}" if x != "inf" else "inf" for x in ratio)
                bins = f"{row['tv_above']:g} to {row['tv_at_most']:g}"
                rows.append([name, bins, str(row["cells"]), shown, f"{row['says_nothing']:.1%}"])
    parts.append(markdown_table(("KV cache", "true TV", "cells", "meter / TV: 5 %, median, 95 %", "meter is 1"), rows))
    parts.append(f"{asked(found['about'])}.")
    return "\n\n".join(parts)


def layers_block(found: Result) -> str:
    rows, sentences = [], []
    for name, result in found["quantizers"].items():
        rows += [[name, *row] for row in sweep.sweep_rows({"rows": settings_shown(result["rows"])})]
        sums = result["cancellation"]
        alone = [row for row in result["rows"] if row["kind"] == "only"]
        losing = sum(row["lost"]["value"] > 0 for row in alone)
        sentences.append(
            f"`{name}`: {losing} of {len(alone)} layers lose an answer by themselves; "
            f"{sums['lost']['all']:.1%} lost with all layers, {sums['lost']['sum_of_single']:.1%} "
            f"summed over one layer at a time; KL {sums['kl']['all']:.4f} and {sums['kl']['sum_of_single']:.4f}"
        )
    answers = next(iter(found["quantizers"].values()))
    head = f"{answers['samples']} answers, {answers['exact_right']} of them right from the exact cache"
    return f"{markdown_table(('KV cache', *sweep.SWEEP_COLUMNS), rows)}\n\n{head}. {'. '.join(sentences)}."


def settings_shown(rows: Sequence[Result]) -> list[Result]:
    """All of a short sweep; of a long one the layers of largest KL, all together, and runs at every fifth layer."""
    if len(rows) <= MOST_SETTINGS:
        return list(rows)
    alone = sorted((row for row in rows if row["kind"] == "only"), key=lambda row: -row["kl"]["value"])
    ends = [
        row
        for row in rows
        if (row["kind"] == "prefix" and len(row["layers"]) % 5 == 0)
        or (row["kind"] == "suffix" and row["layers"][0] % 5 == 0)
    ]
    return [*alone[:LAYERS_SHOWN], *ends, *(row for row in rows if row["kind"] == "all")]


def drift_block(found: Result) -> str:
    """Log-perplexity above the exact cache's, of both models, beside what each paper says of its own."""
    original, twin = (found[name]["quantizers"] for name in ("original", "twin"))
    rows = []
    for name, result in original.items():
        rows.append(
            [
                name,
                interval(result["nll_increase"], signed=True),
                interval(result["kl"]),
                interval(result["top1"]),
                interval(twin[name]["nll_increase"], signed=True),
                interval(twin[name]["kl"]),
                FIGURES_OF_PAPERS.get(name.partition(":")[0], "-"),
            ]
        )
    about, exact = found["original"]["about"], found["original"]["exact"]["nll"]
    columns = ["KV cache", "nats above exact", "KL to exact", "same likeliest token"]
    columns += ["twin: nats above exact", "twin: KL to exact", "the paper's own figure"]
    return (
        f"{markdown_table(columns, rows)}\n\n{about['samples']} windows of `{about['text']}` (Python "
        f"{about['python']}), {about['context']} tokens read exactly and {about['tokens']} scored after them; exact "
        f"cache: {interval(exact)} nats a token."
    )


def risk_block(found: Result) -> str:
    """Every statistic within caches and across them, and what the score in summaries is worth by cache."""
    curve, chance = found["curve"], found["no_better_than_chance"]
    choice = [
        [f"`{name}`", *(f"{x[half][kind]:.3f}" for half in ("chosen_on", "reported") for kind in ("within", "across"))]
        for name, x in found["candidates"].items()
    ]
    columns = ("statistic", "within, chosen on", "across, chosen on", "within, reported", "across, reported")
    ranked = markdown_table(("model and KV cache", *risk_run.COLUMNS[1:]), risk_run.risk_rows(found))
    listed = f": {', '.join(chance)}" if chance else ""
    counts = ", ".join(f"{n['prose']} of prose and {n['needles']} needles ({m})" for m, n in found["requests"].items())
    return (
        f"{markdown_table(columns, choice)}\n\n{ranked}\n\nThe score: x^p / (x^p + h^p) of `{found['statistic']}`, "
        f"h = {curve['half']:.4g}, p = {curve['power']:.3g}; best on the first half: `{found['best']}`. {counts}; "
        f"every second request was chosen on, the others are reported. Within {len(chance)} of "
        f"{len(found['quantizers'])} caches the score ranks drift no better than chance{listed}."
    )
