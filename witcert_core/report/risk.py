"""How likely compression changed a request's text: an estimate, not a bound.

Bounds say how far attention can have moved, layer by layer, not what became of the text. The score is one statistic of
the measured cells, the mean of `log A` over the last third of the layers (each layer counting the same, exact cells
left out), put through a curve from 0 to 1 that was fitted to texts which did or did not part from those of the exact
cache. Damage near the output reaches the text, damage in early layers mostly does not: over all layers the same mean
ranks the requests of one cache no better than chance. Output bounds of the middle layers rank as well, but they are
looser under some kernels than under others, so their scale would be another in every engine.

Which statistic ranks drift, and how well, was measured: `make figures` makes it again for the model it was chosen on,
`witcert eval risk` for another. The score tells caches that harm a model from ones that do not; among the requests of
one cache it ranks little, and in some nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

STATISTIC = "log_a_last_third"
"""As `witcert eval risk` calls it."""
MOST_LOG_A = 1e6
"""What `log A` of a cell counts as at most, so that means exist."""
HALF, POWER = 0.669, 0.702
"""At a mean of HALF half of the texts changed; POWER says how steeply that grows. Of `docs/figures/risk.json`."""
MEANING = "an estimate of how likely compression changed the text, not a bound"


def estimate(log_a: float) -> float:
    """The score, 0 to 1, rising with the mean of `log A` over the last third of the layers."""
    x = math.pow(log_a, POWER)
    return x / (x + math.pow(HALF, POWER))


def of_last_layers(sums: Sequence[float], cells: Sequence[int]) -> float:
    """Mean over the last third, rounded up, of the layers up to the last that has cells, of which there is one; by
    layer: sums of `log A`, and of how many cells."""
    measured = [layer for layer, count in enumerate(cells) if count]
    last = measured[-1]
    means = [sums[layer] / cells[layer] for layer in measured if 3 * (last - layer) <= last]
    return sum(means) / len(means)
