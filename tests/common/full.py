"""Tests that run only when they are asked for by their marker (`-m full_grid`): too many for every run."""

from __future__ import annotations

import pytest


def leave_out(config: pytest.Config, items: list[pytest.Item], marker: str) -> None:
    """Deselect the tests of a marker, unless the command line names it."""
    if marker in config.getoption("markexpr"):
        return
    left_out = [item for item in items if item.get_closest_marker(marker)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker(marker)]
