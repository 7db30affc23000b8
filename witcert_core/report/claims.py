"""What a measurement claims, in the words every report uses."""

from __future__ import annotations

from witcert_core.quantizers.base import Tier

LOCAL = "local to a layer: nothing is claimed end to end"


def claim(tier: Tier, delta: float, witness_beside: bool) -> str:
    """The claim of a request's meter. delta: the failure probability of the request (tier dither only)."""
    if tier == "witness":
        return f"tier W: deterministic, any query; {LOCAL}"
    beside = "tier W (deterministic, any query) is reported beside it" if witness_beside else "tier W was not measured"
    return f"tier D: probability >= 1-{delta:g}, non-adaptive queries; {beside}; {LOCAL}"
