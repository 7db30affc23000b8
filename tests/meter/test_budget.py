import math
from collections.abc import Callable

import pytest

from witcert_core.errors import BudgetError
from witcert_core.meter.budget import Budget


@pytest.mark.parametrize("declared", [None, 1, 7, 1000])
def test_all_cells_of_all_rows_together_spend_at_most_delta(declared: int | None) -> None:
    budget = Budget(0.01, num_layers=3, num_qo_heads=4, declared_rows=declared)
    total = 0.0
    for t in range(1, 2001):
        total += 12 * budget.delta_loc(t)
        assert total <= 0.01
    assert total > 0.0099


def test_a_declared_length_shares_equally_and_ends() -> None:
    budget = Budget(0.01, 2, 8, declared_rows=50)
    assert budget.delta_loc(1) == budget.delta_loc(50) == pytest.approx(0.01 / (2 * 8 * 50))
    assert budget.delta_loc(51) == 0.0


def test_an_unknown_length_follows_the_inverse_squares() -> None:
    budget = Budget(0.01, 2, 8)
    assert budget.delta_loc(3) == pytest.approx(0.01 * 6 / (math.pi**2 * 9 * 16))
    assert budget.delta_loc(10**6) > 0.0


def test_every_reader_of_a_shared_prefix_pays_for_itself() -> None:
    """Two requests are two budgets: a row's share does not depend on who wrote the tokens it sees."""
    first, second = Budget(0.01, 1, 1, 10), Budget(0.01, 1, 1, 10)
    assert first.delta_loc(1) == second.delta_loc(1) > 0.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Budget(0.0, 1, 1),
        lambda: Budget(1.0, 1, 1),
        lambda: Budget(math.nan, 1, 1),
        lambda: Budget(0.1, 0, 1),
        lambda: Budget(0.1, 1, 1, 0),
        lambda: Budget(0.1, 1, 1).delta_loc(0),
    ],
)
def test_meaningless_budgets_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(BudgetError, match=r"must be|must lie|must not|counted from"):
        make()
