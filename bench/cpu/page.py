"""The measured figures as a page of markdown: ratios side by side, aims missed in the same table as those met."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.common.report import Columns, Row, table

WIDE = ("vLLM bf16", "SDPA bf16", "SDPA fp32")
"""Peers that hold a number in 16 bit or more."""
METERED, PLAIN, CERTIFY, FP8 = "INT8 metered", "INT8", "certify (meter alone)", "vLLM fp8"


def time_of(name: str) -> Callable[[Row], str]:
    """Milliseconds of a contestant, empty where it was left out."""
    return lambda row: f"{1e3 * row['seconds'][name]:.3g}" if name in row["seconds"] else ""


def times(row: Row, peers: tuple[str, ...], of: str) -> str:
    """The time of the fastest of `peers` over that of `of`."""
    own, found = row["seconds"], [row["seconds"][name] for name in peers if name in row["seconds"]]
    return f"{min(found) / own[of]:.2f}" if found and of in own else ""


def named(row: Row) -> str:
    """A shape in words."""
    return f"D {row['head_dim']}, {row['kv_heads']} x {row['group']}, S {row['length']}, batch {row['batch']}"


def attention_columns(memory: float) -> Columns:
    """For bytes a second at which memory is read."""

    def share(row: Row) -> str:
        if METERED not in row["seconds"]:
            return ""
        return f"{100 * row['bytes'][METERED] / row['seconds'][METERED] / memory:.0f} %"

    return {
        "D": lambda r: f"{r['head_dim']}",
        "heads": lambda r: f"{r['kv_heads']} x {r['group']}",
        "S": lambda r: f"{r['length']}",
        "batch": lambda r: f"{r['batch']}",
        "INT8 metered": time_of(METERED),
        "INT8": time_of(PLAIN),
        **{name: time_of(name) for name in (*WIDE, FP8)},
        "certify": time_of(CERTIFY),
        "fastest wide / INT8 metered": lambda r: times(r, WIDE, METERED),
        "fp8 / INT8 metered": lambda r: times(r, (FP8,), METERED),
        "metered / not": lambda r: times(r, (METERED,), PLAIN),
        "certify / vLLM bf16": lambda r: times(r, (CERTIFY,), "vLLM bf16"),
        "of memory": share,
    }


def aims(rows: list[Row]) -> list[str]:
    """How many shapes keep what is aimed at, of those that have the numbers."""

    def kept(name: str, ratios: list[float], holds: Callable[[float], bool]) -> str:
        return f"- {name}: {sum(map(holds, ratios))} of {len(ratios)} shapes ({min(ratios):.2f} to {max(ratios):.2f})"

    def ratio(row: Row) -> float:
        found: dict[str, float] = row["seconds"]
        return min(found[name] for name in WIDE if name in found) / found[METERED]

    compared = [row for row in rows if any(name in row["seconds"] for name in WIDE)]
    long, short = ([row for row in compared if (row["length"] >= 4096) is at_least] for at_least in (True, False))
    cost = [row["seconds"][METERED] / row["seconds"][PLAIN] for row in rows]
    return [
        kept(
            "metered at least 1.5 times as fast as the fastest wide kernel from 4096 tokens on",
            [*map(ratio, long)],
            ge(1.5),
        ),
        kept("metered never slower at 1024", [*map(ratio, short)], ge(1.0)),
        kept("metered at most 1.10 times the time of unmetered", cost, lambda x: x <= 1.10),
    ]


def ge(least: float) -> Callable[[float], bool]:
    return lambda x: x >= least


WRITING: Columns = {
    "tokens": lambda r: f"{r['tokens']}",
    "append (us)": lambda r: f"{1e6 * r['seconds']['append']:.0f}",
    "copy (us)": lambda r: f"{1e6 * r['seconds']['copy']:.0f}",
    "append / copy": lambda r: times(r, ("append",), "copy"),
}


def page(found: dict[str, Any]) -> str:
    """All of it."""
    memory = found["memory_bytes_per_second"]
    rows = found["attention"]
    left = [f"- left out at {named(row)}: {who}" for row in rows for who in row["left_out"]]
    parts = [
        "# Attention over a cache on a CPU, measured",
        "",
        f"Written by `make bench-cpu` on {found['date']}: {found['processor']}, {found['cores']} cores, "
        f"{found['threads']} thread(s), load {found['load']}, PyTorch {found['torch']}; memory is read at "
        f"{memory / 1e9:.1f} GB/s by one sum.",
        "",
        "One query token a request. Milliseconds (of the thread's own time where there is one), the fastest of rounds "
        "in which all take turns; every cache is cold (at least 128 MiB of codes are read in turn). *Heads*: KV "
        "heads x query heads of each. *Fastest wide*: of "
        "vLLM's CPU kernel in bfloat16 and PyTorch's attention in bfloat16 and float32; above 1, ours is faster. "
        "*Certify*: the meter alone over a bfloat16 pool, which an engine's kernel attends beside it. *Of memory*: "
        "bytes of the packed cache over the time of INT8 metered, as a share of the reading rate. vLLM's kernel here "
        "has no `int8_per_token_head`, which is Triton's alone; its 8-bit cache there is fp8.",
        "",
        table(attention_columns(memory), rows),
        "",
        *(left or ["Nothing was left out."]),
        "",
        "## Aims",
        "",
        *aims(rows),
        "",
        "Where an aim is missed, instructions are the reason, not memory (*of memory*). To what 8-bit products left of "
        "the attention the meter adds radii, an exponential and eight sums a token and query head, and the norm of "
        "every value.",
        "",
        "## Writing (8 KV heads of 128 channels, slots at random)",
        "",
        table(WRITING, found["writing"]),
    ]
    return "\n".join(parts) + "\n"
