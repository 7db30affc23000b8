"""A pre-RoPE, calibrated and a grouped quantizer from plugins in vLLM, chunks and decode rows in one pass."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import samples_of_each_task
from engine import running_engine
from witcert_vllm.geometry import rotary_modules
from witcert_vllm.refusals.server import CONFIG_ROWS, Resolved

from witcert_core.errors import UnsupportedError
from witcert_core.policy.model import parse_policy
from witcert_core.serving.refusals import refuse

pytestmark = pytest.mark.vllm

SERVED = [("kvquant", {"bits": 4}), ("kivi", {"bits": 4, "residual": 64})]


@pytest.mark.parametrize(("name", "params"), SERVED, ids=[name for name, _ in SERVED])
def test_answers_audits_and_shared_prefixes(
    name: str, params: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    policy = {
        "quantizer": {"name": name, "params": params},
        "meter": {"stride": 2, "audit_every": 1, "max_rows": 2},
    }
    samples = samples_of_each_task(1, num_tokens=384)
    options = {"block_size": 64, "max_num_batched_tokens": 128, "max_num_seqs": 4}
    with running_engine(checkpoint, tmp_path, policy, **options) as engine:
        answers = engine.ask([sample.prompt for sample in samples])
        right = sum(a.tokens[: len(s.answer_ids)] == list(s.answer_ids) for a, s in zip(answers, samples, strict=True))
        assert right >= len(samples) - 1
        (again,) = engine.ask([samples[0].prompt])
        assert again.cached >= 256
        bounds = [bound for answer in (*answers, again) for bound in engine.cells(answer).values()]
    assert len(bounds) > 100
    assert max(bounds) > 0.01  # something was quantized: an exact cache has no bound above rounding
    assert min(bounds) < 0.9


@pytest.mark.parametrize(("name", "unit"), [("kivi", 32), ("kvquant", 64), ("nvfp4", 1)])
def test_blocks_that_would_split_a_group_are_refused(name: str, unit: int) -> None:
    (row,) = [row for row in CONFIG_ROWS if "several tokens together" in row.what]
    policy = parse_policy({"version": 1, "quantizer": {"name": name}})

    def check(block_size: int, shares: bool) -> None:
        cache = SimpleNamespace(block_size=block_size, enable_prefix_caching=shares)
        refuse([row], Resolved(SimpleNamespace(cache_config=cache), policy, {}))

    for block_size in (16, 32, 64, 128):
        check(block_size, shares=False)
        if block_size % unit == 0:
            check(block_size, shares=True)
            continue
        said = f"takes {unit} tokens together, .* in units of {block_size}: .*--block-size that is a multiple of that"
        with pytest.raises(UnsupportedError, match=said):
            check(block_size, shares=True)


def test_the_rotary_embedding_beside_a_layer_is_found() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.ModuleDict({"attn": torch.nn.Identity()})})
    model["b"] = torch.nn.ModuleDict({"attn": torch.nn.Identity()})
    model["b"].rotary_emb = torch.nn.Identity()
    assert rotary_modules(model, {"a.attn": 0, "b.attn": 1}) == {0: None, 1: model["b"].rotary_emb}
