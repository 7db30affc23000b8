"""A model that raises: what its user reads is that error, not what its absence did to the meter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import prompts
from engine import running_engine

pytestmark = pytest.mark.vllm


def raising(*_args: Any, **_kwargs: Any) -> Any:
    raise ValueError("this layer cannot multiply")


@pytest.mark.parametrize("layer", [0, 2])
def test_an_error_of_the_model_is_what_its_user_reads(checkpoint: Path, tmp_path: Path, layer: int) -> None:
    """Before the first metered call, and after some of them."""
    policy = {"quantizer": {"name": "int8_token_group"}}
    with running_engine(checkpoint, tmp_path, policy) as engine:
        (answer,) = engine.ask(prompts(seed=3)[:1])
        assert answer.summary["cells_measured"] > 0
        worker = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        worker.model_runner.model.model.layers[layer].self_attn.qkv_proj.forward = raising
        with pytest.raises(ValueError, match="this layer cannot multiply"):
            engine.ask(prompts(seed=4)[:1])
