"""Kernels run interpreted where there is no GPU. The variable must be set before Triton is imported."""

from __future__ import annotations

import os

import full
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)


@pytest.fixture(params=["triton", "cpu"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernels read what lies on a CPU: Triton's, interpreted, or those that are compiled for it."""
    monkeypatch.setenv("TRITON_INTERPRET", "1" if request.param == "triton" else "0")
    return str(request.param)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full_grid: every shape of a kernel, hours when interpreted")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The full grid runs only when asked for by ``-m full_grid``."""
    full.leave_out(config, items, "full_grid")
