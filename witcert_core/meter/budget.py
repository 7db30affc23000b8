"""How a request's failure probability is shared among its cells (the probabilistic tier only).

One event per (layer, query head, query row), each a union over its visible tokens. A request pays for
every row it evaluates itself, over all tokens that row sees: a shared prefix is paid for by every reader.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from witcert_core.errors import BudgetError

_SERIES = 6.0 / math.pi**2
"""``sum 1/t^2 = pi^2/6``, so these weights sum to 1 over an unknown number of rows."""


@dataclass(frozen=True)
class Budget:
    """Budget of one request.

    Args:
        delta: failure probability of the whole request, in (0, 1).
        num_layers: metered layers ``L``.
        num_qo_heads: query heads ``H`` of the whole model.
        declared_rows: every query row the request will evaluate, prompt and recomputation included; ``None``
            when unknown (the ``6/(pi^2 t^2)`` series is used).
    """

    delta: float
    num_layers: int
    num_qo_heads: int
    declared_rows: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.delta < 1.0:
            raise BudgetError(f"delta is {self.delta}; it must lie strictly between 0 and 1")
        if self.num_layers < 1 or self.num_qo_heads < 1:
            raise BudgetError(
                f"num_layers={self.num_layers}, num_qo_heads={self.num_qo_heads}; both must be at least 1"
            )
        if self.declared_rows is not None and self.declared_rows < 1:
            raise BudgetError(f"declared_rows is {self.declared_rows}; it must be at least 1, or null if unknown")

    def _row_share(self, t: int) -> float:
        if t < 1:
            raise BudgetError(f"row index is {t}; rows of a request are counted from 1")
        if self.declared_rows is None:
            return _SERIES / (t * t)
        return 1.0 / self.declared_rows if t <= self.declared_rows else 0.0

    def delta_loc(self, t: int) -> float:
        """Probability that one cell of the request's ``t``-th row (from 1) may fail.

        0.0 beyond a declared length: only the deterministic tier may be reported there.
        """
        return self._row_share(t) * self.delta / (self.num_layers * self.num_qo_heads) * (1.0 - 2.0**-40)
