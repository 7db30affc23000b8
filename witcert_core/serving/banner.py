"""The start-up banner: what is metered, what is not and why, and the memory taken."""

from __future__ import annotations

from typing import Any

from witcert_core.cache.schedule import QuantizeSchedule
from witcert_core.policy.model import NEVER
from witcert_core.report.claims import NON_ADAPTIVE
from witcert_core.report.text import format_bytes
from witcert_core.serving.runtime import Runtime


def banner_text(runtime: Runtime, *, answers: str, metrics: str, note: str = "") -> str:
    """Several lines for the server's log.

    answers: where an answer carries its summary; metrics: where Prometheus finds them, or what is missing. note: what
    an engine has to say of the way it is metered.
    """
    status, policy, geometry = runtime.status(), runtime.policy, runtime.geometry
    metered, quantized = status["layers_metered"], status["layers_quantized"]
    cells = len(metered) * geometry.total_qo_heads
    claim = "deterministic, any query"
    if why := runtime.planner.without_law:
        claim += f"; no probabilistic tier: {why}"
    elif runtime.uses_dither:
        claim = f"probabilistic, {NON_ADAPTIVE}; the deterministic tier beside it"
    lines = [
        f"WitCert meters this server: {status['quantizer']} in a {status['pool_dtype']} pool, {geometry.backend}",
        f"  cells a metered row : {cells} ({len(metered)} of {len(runtime.layers)} layers "
        f"x {geometry.total_qo_heads} query heads{on_ranks(status['num_ranks'])})",
        *latent(runtime),
        f"  tier                : {status['tier']} ({claim})",
        f"  rows                : {rows(runtime)}",
        f"  audited             : {audited(policy.meter.audit_every, status)}",
        *sketched(status),
        f"  prefill reads       : {policy.prefill_reads}",
        f"  tokens quantized    : {QuantizeSchedule.of(runtime.quantizer).describe()}",
        f"  kernels             : {status['kernels']}",
        f"  memory              : {format_bytes(status['bytes_witness'])} of witnesses and pass ids, "
        f"{format_bytes(status['bytes_audit_copies'])} of exact copies for the audit",
        f"  gate                : {gate(status)}",
        f"  reports             : {reports(runtime, answers, metrics)}",
    ]
    if note:
        lines.append(f"  note                : {note}")
    lines += [f"  not metered         : {why}" for why in not_metered(runtime, metered, quantized)]
    return "\n".join(lines)


def on_ranks(count: int) -> str:
    return "" if count == 1 else f" on {count} ranks"


def latent(runtime: Runtime) -> list[str]:
    """A line, or none where keys and values are those of heads."""
    geometry = runtime.geometry
    if not geometry.latent:
        return []
    return [
        f"  latent cache        : a token is {geometry.v_head_dim} channels of the latent and "
        f"{geometry.head_dim - geometry.v_head_dim} of RoPE; output bounds are in latent space"
    ]


def rows(runtime: Runtime) -> str:
    stride, most = runtime.planner.stride, runtime.planner.max_rows
    if runtime.policy.repairs:
        return "all that read the cache: the gate needs every cell"
    if stride == NEVER:
        return "none but those that probes ask for (meter.stride: never)"
    if stride == 1:
        return f"all decode rows; of a chunk that reads the cache the last {most}"
    return (
        f"one decode row in {stride}; of a chunk that reads the cache the last row and one in {stride}, at most {most}"
    )


def audited(every: int, status: dict[str, Any]) -> str:
    if status["audit_share"]:
        return (
            f"{status['audit_share']:.4g} of the requests, drawn at random, {status['sample_tokens']} tokens at a time "
            f"({format_bytes(status['bytes_sample'])} of exact copies in host memory)"
        )
    if every == 0:
        return "no row (meter.audit_every: 0)"
    return "every metered row" if every == 1 else f"one metered row of a request in {every}"


def sketched(status: dict[str, Any]) -> list[str]:
    """A line, or none where no sample is sketched."""
    if not status["sketch_share"]:
        return []
    return [
        f"  sketched            : {status['sketch_share']:.4g} of the requests, drawn at random, "
        f"{status['sketch_tokens']} tokens at a time ({format_bytes(status['bytes_sketches'])} of 8-bit sketches in "
        "host memory)"
    ]


def gate(status: dict[str, Any]) -> str:
    if not status["copy_slots"]:
        return f"{status['gate']} (measures only)"
    copies = f"{format_bytes(status['bytes_copies'])} of exact copies for {status['copy_slots']} slots"
    return f"{status['gate']}, {copies}"


def reports(runtime: Runtime, answers: str, metrics: str) -> str:
    report = runtime.policy.report
    parts = [answers, "/witcert/requests/{id}"] if report.per_request else []
    if report.prometheus:
        parts.append(metrics)
    if report.jsonl:
        parts.append(report.jsonl)
    return ", ".join(parts) or "none"


def not_metered(runtime: Runtime, metered: list[int], quantized: list[int]) -> list[str]:
    """One reason a line; rows the stride leaves out are reported as unknown, never as fine."""
    layers = runtime.layers
    reasons = []
    if runtime.without_cache:
        reasons.append(f"layers {list(runtime.without_cache)}: they keep no keys and values (states, if any)")
    if missing := [layer for layer in layers if layer not in metered]:
        reasons.append(f"layers {missing}: left out by meter.layers")
    if exact := [layer for layer in layers if layer not in quantized]:
        reasons.append(f"nothing to meter in layers {exact}: quantizer.layers keeps them exact")
    if runtime.policy.stride != 1:
        reasons.append("rows between the stride: counted as unknown in every report")
    if runtime.policy.prefill_reads == "chunk_exact":
        reasons.append("first-chunk prompt rows: they read no quantized key (prefill_reads: chunk_exact)")
    if runtime.geometry.device != "cpu":
        reasons.append("nothing here has been run on a GPU by us yet: let meter.audit_every check it")
    reasons.append("drift of hidden states against an uncompressed run: no bound is local to more than its layer")
    return reasons
