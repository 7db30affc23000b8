"""Beside another KV connector: what it loads is unknown, all else is as if it were not there."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import prompts
from engine import HEADS, LAYERS, running_engine
from loading_connector import LOADED_LENGTH
from vllm.config.kv_transfer import KVTransferConfig

pytestmark = pytest.mark.vllm

POLICY = {"quantizer": {"name": "int8_token_group"}, "meter": {"stride": 1, "audit_every": 1, "max_rows": 2}}


def test_loaded_tokens_are_unknown_and_the_rest_is_as_before(checkpoint: Path, tmp_path: Path) -> None:
    plain, loaded = prompts(seed=81, num_tokens=128)[0], prompts(seed=81, num_tokens=LOADED_LENGTH)[0]
    with running_engine(checkpoint, tmp_path / "alone", POLICY, block_size=32) as engine:
        expected = [(answer, engine.cells(answer)) for answer in engine.ask([plain])]
    other = KVTransferConfig(
        kv_connector="LoadingConnector", kv_connector_module_path="loading_connector", kv_role="kv_both"
    )
    with running_engine(checkpoint, tmp_path / "beside", POLICY, block_size=32, kv_transfer_config=other) as engine:
        found = [(answer, engine.cells(answer)) for answer in engine.ask([plain])]
        (blind,) = engine.ask([loaded], max_tokens=4, ignore_eos=True)
        blind_cells = engine.cells(blind)
        again = engine.ask([plain])[0]
    assert [answer.tokens for answer, _ in found] == [answer.tokens for answer, _ in expected]
    assert found[0][1] == pytest.approx(expected[0][1], abs=1e-6)
    assert again.summary["worst"]["meter"] < 1.0  # blocks that were unknown are known again once they are written
    # Two rows of the chunk and three generated ones read the loaded tokens.
    assert len(blind_cells) == 5 * LAYERS * HEADS
    assert set(blind_cells.values()) == {1.0}
