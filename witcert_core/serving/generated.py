"""Which slots hold tokens that this server sampled: a request that reads another's has no probabilistic tier.

A sampled token depends on the dither of the keys it was sampled over. A request whose cached prefix holds such tokens
has a text that may depend on the dither of that prefix, so only the deterministic tier is claimed for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class GeneratedSlots:
    """bool [SLOTS], beside the pass ids; a slot that something else may have filled counts as sampled."""

    def __init__(self, num_slots: int, device: str | torch.device = "cpu") -> None:
        self._generated = torch.zeros(num_slots, dtype=torch.bool, device=device)

    @property
    def nbytes(self) -> int:
        return self._generated.nbytes

    def written(self, slots: Tensor, new_tokens: Sequence[int], generated: Sequence[int]) -> None:
        """A pass writes into `slots` [N]: of request i new_tokens[i], the last generated[i] of which were sampled."""
        if not any(generated):
            self._generated[slots] = False
        elif list(generated) == list(new_tokens):
            self._generated[slots] = True
        else:
            counts = zip(new_tokens, generated, strict=True)
            flags = [number >= new - own for new, own in counts for number in range(new)]
            self._generated[slots] = torch.tensor(flags).to(slots.device)

    def among(self, slots: Tensor) -> bool:
        """Whether some of `slots` [N] hold a sampled token."""
        return bool(self._generated[slots].any())

    def moved(self, target: Tensor, source: Tensor) -> None:
        """The engine copied slots `source` [N] onto `target` [N]."""
        self._generated[target] = self._generated[source]

    def overwritten(self, slots: Tensor) -> None:
        """The engine wrote `slots` [N] from elsewhere."""
        self._generated[slots] = True
