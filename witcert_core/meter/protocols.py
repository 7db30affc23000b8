"""What the meter asks of a cache: its tokens and their radii."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


class Radii(Protocol):
    """Radii of the tokens in the cache slots of one layer."""

    def key_radius(self, q: Tensor, slots: Tensor, sm_scale: float, delta_loc: float) -> Tensor:
        """Bound on each logit's error, float64 ``[H, S]``, for ``q [H, D]`` float64 and ``slots [S]``."""
        ...

    def value_radius(self, slots: Tensor) -> Tensor:
        """Float64 ``[S, Hkv]`` bound on ``||v~ - v||``."""
        ...

    def residuals(self, slots: Tensor) -> tuple[Tensor, Tensor] | None:
        """Estimates of ``k~ - k`` ``[S, Hkv, D]`` and ``v~ - v`` ``[S, Hkv, Dv]``, or None.

        With them the radii are around the corrected cache, not around the stored one.
        """
        ...

    def exact_heads(self, slots: Tensor) -> Tensor:
        """Bool ``[S, Hkv]``: heads of which key and value are read exactly as the run handed them over."""
        ...


@runtime_checkable
class JointRadii(Protocol):
    """Radii that can be had of several rows at once."""

    def joint_key_radius(self, q: Tensor, slots: Tensor, sm_scale: float) -> Tensor:
        """As `Radii.key_radius`, none spent: float64 ``[R * H, S]`` for ``q [R * H, D]`` and ``slots [S, R]``."""
        ...
