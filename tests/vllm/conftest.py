"""Checkpoints and prompts; vLLM runs in this process unless a test starts a server."""

from __future__ import annotations

import os
from pathlib import Path

# Read when vLLM is imported.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import full
import pytest
from witcert_demo.run import CHECKPOINT, build_twin
from witcert_demo.tasks import Sample, make_samples

TASKS = ("single_needle", "multi_key", "variable_tracking")


def samples_of_each_task(count: int, num_tokens: int = 256, seed: int = 3) -> list[Sample]:
    return [s for task in TASKS for s in make_samples(task, num_tokens, count, seed)]


def prompts(seed: int, count: int = 1, num_tokens: int = 256) -> list[str]:
    return [sample.prompt for sample in samples_of_each_task(count, num_tokens, seed)]


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    return CHECKPOINT


@pytest.fixture(scope="session")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_twin(tmp_path_factory.mktemp("twin"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full_zoo: a family of models beside those that every run serves")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    full.leave_out(config, items, "full_zoo")
