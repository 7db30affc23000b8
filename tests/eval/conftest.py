"""The demonstration's model and its outlier twin, loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest
from witcert_demo.run import CHECKPOINT, build_twin

from witcert_core.evaluate.offline.model import LoadedModel, load_model


@pytest.fixture(scope="session")
def twin_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_twin(tmp_path_factory.mktemp("twin"))


@pytest.fixture(scope="session")
def twin(twin_path: Path) -> LoadedModel:
    return load_model(str(twin_path))


@pytest.fixture(scope="session")
def original() -> LoadedModel:
    return load_model(str(CHECKPOINT))
