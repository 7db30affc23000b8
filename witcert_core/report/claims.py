"""What a measurement claims, in the words every report uses."""

from __future__ import annotations

from witcert_core.quantizers.base import Tier

VOID = "nothing: outputs of the engine are not attention over what is stored, so its bounds are about other weights"
"""Of a request in which an audited output did not match."""
LOCAL = "local to a layer: nothing is claimed end to end"
NON_ADAPTIVE = "non-adaptive queries: texts fixed before the cached prefix was written"
SAMPLED_PREFIX = "its cached prefix holds tokens that were sampled, or loaded, before"
AFTER_ITS_ANSWER = "its text goes on, or may go on, after an answer of its own"
ADAPTIVE_DRAFTS = "which drafts are made for it, and so which tokens share a dither, may depend on the dither it reads"
NOT_FROM_ITS_START = "its earlier passes were forgotten, or not seen"


def claim(tier: Tier, delta: float, cells_beside: int, cells_undithered: int, without_law: str = "") -> str:
    """The claim of a request's meter.

    delta: the failure probability of the request. cells_beside: cells that also have a deterministic bound.
    cells_undithered: cells whose only bound is deterministic, the declared rows being used up (tier dither).
    without_law: why nothing is claimed of this request under the dither law, though it is of others; or ''.
    """
    if without_law:
        return f"deterministic tier: any query (no probabilistic tier for this request: {without_law}); {LOCAL}"
    if tier == "deterministic":
        return f"deterministic tier: any query; {LOCAL}"
    law = f"probabilistic tier: probability >= 1-{delta:g}, {NON_ADAPTIVE}"
    beside = (
        "the deterministic tier (any query) beside it"
        if cells_beside
        else "the deterministic tier was not measured beside it"
    )
    beyond = (
        f"; {cells_undithered} cells beyond the declared rows have the deterministic tier alone"
        if cells_undithered
        else ""
    )
    return f"{law}; {beside}{beyond}; {LOCAL}"
