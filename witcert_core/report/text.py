"""The summary of a request for people. Unknown is shown as unknown, and numbers are rounded against us."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from witcert_core.report.risk import MEANING

UNKNOWN = "?"
EXACT = "="
NONE = "–"
_TARGETS = {"tv": "weights", "output": "output", "both": "weights and output"}
_VERDICTS = {
    "within_target": "cells within its target",
    "ranked": "saturated cells brought down by rank, which promises nothing",
    "above_target": "cells left ABOVE its target",
    "exact": "exact cells",
}


def render_sentence(summary: Mapping[str, Any]) -> str:
    """What the meter saw of a request (schema witcert.request/1), in one sentence.

    Example:
        >>> import witcert_core as wc
        >>> policy = wc.Policy(version=1, quantizer={"name": "int4_token_group"})
        >>> ledger = wc.RequestLedger(policy, engine="mine", num_layers=2, num_qo_heads=4)
        >>> ledger.count_unknown("request-1", 3, "stride")
        >>> print(wc.render_sentence(ledger.summary("request-1")).partition(";")[0])
        request request-1 (int4_token_group on mine): nothing was measured (stride: 24)
    """
    who = f"request {summary['request_id']} ({summary['quantizer']} on {summary['engine']})"
    measured, exact, unknown = summary["cells_measured"], summary["cells_exact"], summary["cells_unknown"]
    if not measured and not exact:
        return (
            f"{who}: nothing was measured{_why(summary['unknown_reasons'])}; "
            "how far compression moved its attention is unknown"
        )
    counts = [f"{measured} of {measured + exact + unknown} cells were measured"]
    if exact:
        counts.append(f"{exact} read nothing quantized" + (f" ({waiting(summary)})" if measured else ""))
    if unknown:
        counts.append(f"the other {unknown} are unknown{_why(summary['unknown_reasons'])}")
    parts = [
        f"{_violations(summary['audit'])}{_violations(summary['sample'])}{_worst(summary)}",
        ", ".join(counts) + ("" if measured else ", so there is nothing to certify"),
        *_certified(summary),
        *_damage(summary),
        *_unbounded_outputs(summary["out_unbounded_layers"]),
        *_risk(summary),
        *_audit(summary["audit"]),
        *_sample(summary["sample"]),
        *_gate(summary["gate"]),
        summary["claim"],
    ]
    return f"{who}: " + "; ".join(parts)


def render_table(summary: Mapping[str, Any]) -> Table:
    """Layer by query head: worst bound, green up to tau, yellow above, red if it says nothing, = exact, ? unknown.

    Example:
        >>> import witcert_core as wc
        >>> policy = wc.Policy(version=1, quantizer={"name": "int4_token_group"})
        >>> ledger = wc.RequestLedger(policy, engine="mine", num_layers=2, num_qo_heads=4)
        >>> ledger.count_unknown("request-1", 3, "stride")
        >>> wc.render_table(ledger.summary("request-1")).row_count
        2
    """
    tau = summary["tau"]
    grid = summary["worst_by_layer_head"]
    title = f"worst bound by layer and query head, tau {tau:g}"
    table = Table(title=title, caption=_legend(summary), box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("layer", justify="right", no_wrap=True)
    for head in range(len(grid[0]) if grid else 0):
        table.add_column(str(head), justify="right", no_wrap=True)
    table.add_column("TV certified", justify="right", no_wrap=True)
    table.add_column("decided by", no_wrap=True)
    for layer, meters in zip(summary["by_layer"], grid, strict=True):
        share = layer["tv_certified_cells"] / layer["cells"] if layer["cells"] else None
        nothing = NONE if layer["cells_exact"] else UNKNOWN
        table.add_row(
            str(layer["layer"]),
            *(_shaded(meter, tau) for meter in meters),
            nothing if share is None else percent_down(share),
            layer["form"] or nothing,
        )
    return table


def number_up(value: float, digits: int = 2) -> str:
    """A bound for display, never below itself."""
    scale = 10**digits
    return f"{math.ceil(value * scale) / scale:.{digits}f}"


def percent_down(share: float | None) -> str:
    """A certified share for display: 100 % only when it is all of them, a dash where there is nothing to certify."""
    return NONE if share is None else f"{math.floor(share * 1000) / 10:g} %"


def waiting(summary: Mapping[str, Any]) -> str:
    """Why tokens were read exactly, of a summary in which some cells read nothing else."""
    if summary["waits_for"] is None:
        return "every token they read was exact"
    return f"{summary['quantizer']} {summary['waits_for']}"


def _shaded(meter: float | str | None, tau: float) -> Text:
    if meter is None or isinstance(meter, str):
        return Text(UNKNOWN if meter is None else EXACT, style="dim")
    style = "green" if meter <= tau else "yellow" if meter < 1 else "red"
    return Text(number_up(meter).removeprefix("0") if meter else "0", style=style)


def _legend(summary: Mapping[str, Any]) -> str:
    excluded = [f"layer {layer}: {why}" for layer, why in summary["layers_excluded"].items()]
    unknown = f"{UNKNOWN} not measured, hence unknown; {summary['cells_unknown']} cells in all"
    exact = []
    if summary["cells_exact"]:
        exact = [f"{EXACT} read nothing quantized, hence exact; {summary['cells_exact']} cells in all"]
    return "\n".join([unknown, *exact, *excluded, summary["claim"]])


def _risk(summary: Mapping[str, Any]) -> list[str]:
    return [f"risk {summary['risk']:.2f} ({MEANING})"] if summary["risk"] else []


def _worst(summary: Mapping[str, Any]) -> str:
    worst = summary["worst"]
    if worst is None:
        return f"nothing quantized was read yet: {waiting(summary)}"
    where = f"layer {worst['layer']}, head {worst['q_head']}, position {worst['position']}"
    if worst["meter"] >= 1:
        return f"the bound says nothing about at least one cell (meter 1 at {where})"
    return (
        "compression moved the attention weights of a measured cell "
        f"by at most {number_up(worst['meter'], 4)} total variation ({where}, by {worst['form']})"
    )


def _certified(summary: Mapping[str, Any]) -> list[str]:
    if summary["tv_certified_share"] is None:
        return []
    share = percent_down(summary["tv_certified_share"])
    return [f"{share} of the measured ones have their weights certified at tau {summary['tau']:g}"]


def _unbounded_outputs(layers: list[int]) -> list[str]:
    if not layers:
        return []
    where = f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
    return [f"nothing bounds an output of {where}: its norm is 0, or a value is too large for its radius or no number"]


def _violations(audit: Mapping[str, Any] | None) -> str:
    said = ""
    if audit is None:
        return said
    if audit.get("mismatches"):
        where = audit["worst_mismatch"]
        said = (
            f"THE ENGINE ATTENDS OTHERWISE in {audit['mismatches']} of {audit['outputs']} audited outputs (layer "
            f"{where['layer']}, head {where['q_head']}, position {where['position']}), nothing is certified: "
        )
    if audit["violations"]:
        cells = f"{audit['violations']} of {audit['cells']} audited cells"
        said += f"BOUND VIOLATED in {cells}, do not trust this meter: "
    return said


def _damage(summary: Mapping[str, Any]) -> list[str]:
    if not summary["damaged_cells"]:
        return []
    least = math.floor(summary["floor_max"] * 10**4) / 10**4
    return [f"{summary['damaged_cells']} are certainly damaged beyond it (by at least {least:.4f} in the worst)"]


def _audit(audit: Mapping[str, Any]) -> list[str]:
    if not audit["cells"] or audit["violations"]:
        return []
    outputs = f", and all {audit['outputs']} outputs compared are attention over what is stored"
    return [
        f"none of {audit['cells']} audited cells exceeded its bound (largest true value {audit['tv_max']:.4f})"
        + (outputs if audit["outputs"] and not audit["mismatches"] else "")
    ]


def _sample(sample: Mapping[str, Any] | None) -> list[str]:
    if sample is None:
        return []
    missed = sum(sample["rows_not_audited"].values())
    why = _why(sample["rows_not_audited"])
    parts = [f"{missed} rows of it could not be compared with the truth{why}"] if missed else []
    parts += _sketched(sample["sketched"])
    if sample["tv"] is None:
        return parts
    tv, ratio = sample["tv"], sample["bound_over_tv"]
    loose = "" if ratio is None else f", the bound {_shown(ratio['p50'])} times that in the median"
    moved = f"{_shown(tv['p50'])} in the median and {_shown(tv['max'])} at most"
    return [f"compression really moved {moved}{loose}", *parts]


def _sketched(sketched: Mapping[str, Any] | None) -> list[str]:
    if sketched is None:
        return []
    missed = sum(sketched["rows_not_sketched"].values())
    why = _why(sketched["rows_not_sketched"])
    parts = [f"{missed} rows of it have no sketch of every token{why}"] if missed else []
    if sketched["tv_bound"] is None:
        return parts
    bound, ratio = sketched["tv_bound"], sketched["bound_over_tv"]
    loose = "" if ratio is None else f", {_shown(ratio['p50'])} times the true value in the median"
    found = f"{_shown(bound['p50'])} in the median and {_shown(bound['max'])} at most"
    return [f"sketches bound the total variation by {found}{loose}", *parts]


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"


def _gate(gate: Mapping[str, Any]) -> list[str]:
    if gate["kind"] == "observe":
        return []
    restored = f"restored {gate['repaired_blocks']} blocks ({gate['bytes']} bytes)"
    text = f"gate {gate['kind']} (target: {_TARGETS[gate['target']]}) {restored}"
    told = [f"{gate[key]} {words}" for key, words in _VERDICTS.items() if gate[key]]
    return [f"{text}: {', '.join(told)}" if told else text]


def _why(reasons: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{reason}: {count}' for reason, count in reasons.items())})" if reasons else ""


def format_bytes(count: int) -> str:
    """1536 -> '1.5 KiB'."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
