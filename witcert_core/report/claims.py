"""What a measurement claims, in the words every report uses."""

from __future__ import annotations

from witcert_core.quantizers.base import Tier

LOCAL = "local to a layer: nothing is claimed end to end"


def claim(tier: Tier, delta: float, cells_beside: int, cells_undithered: int) -> str:
    """The claim of a request's meter.

    delta: the failure probability of the request. cells_beside: cells that also have a deterministic bound.
    cells_undithered: cells whose only bound is deterministic, the declared rows being used up (tier dither).
    """
    if tier == "witness":
        return f"tier W: deterministic, any query; {LOCAL}"
    law = f"tier D: probability >= 1-{delta:g}, non-adaptive queries"
    beside = (
        "tier W (deterministic, any query) beside it" if cells_beside else "tier W was not measured beside it"
    )
    beyond = (
        f"; {cells_undithered} cells beyond the declared rows have tier W alone" if cells_undithered else ""
    )
    return f"{law}; {beside}{beyond}; {LOCAL}"
