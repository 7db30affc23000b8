"""The demonstration's model and its outlier twin, loaded once; a tokenizer that reads English."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from witcert_demo.run import CHECKPOINT, build_twin

from witcert_core.evaluate.offline.model import LoadedModel, load_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def bpe() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 1000 pieces, trained on the documentation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([(ROOT / "docs" / "meter.md").read_text()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="session")
def twin_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_twin(tmp_path_factory.mktemp("twin"))


@pytest.fixture(scope="session")
def twin(twin_path: Path) -> LoadedModel:
    return load_model(str(twin_path))


@pytest.fixture(scope="session")
def original() -> LoadedModel:
    return load_model(str(CHECKPOINT))
