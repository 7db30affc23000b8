"""Plugins on the demonstration's model and its outlier twin, through transformers; rotary tables of its families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from witcert_demo.run import CHECKPOINT, build_twin
from witcert_demo.tasks import make_samples

from witcert_core.errors import UnsupportedError
from witcert_core.evaluate.offline.engine import OfflineEngine
from witcert_core.evaluate.offline.model import LoadedModel, load_model
from witcert_core.evaluate.offline.rotary import rotary_tables
from witcert_core.policy.model import parse_policy

(SAMPLE,) = make_samples("multi_key", 300, 1, 3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    twin: Path = build_twin(tmp_path_factory.mktemp("twin"))
    return {"original": load_model(str(CHECKPOINT), "float32"), "twin": load_model(str(twin), "float32")}


def answered(model: LoadedModel, name: str, **params: Any) -> tuple[bool, dict[str, Any]]:
    meter = {"stride": 1, "audit_every": 1, "max_rows": 1}
    policy = parse_policy({"version": 1, "quantizer": {"name": name, "params": params}, "meter": meter})
    answer = OfflineEngine(model, policy, 320).generate("r", model.prompt_ids(SAMPLE.prompt), 8)
    assert answer.summary["audit"]["violations"] == answer.summary["audit"]["mismatches"] == 0
    assert answer.summary["audit"]["cells"] > 0
    return answer.ids[: len(SAMPLE.answer_ids)] == list(SAMPLE.answer_ids), answer.summary["audit"]


@pytest.mark.parametrize(("name", "params"), [("kivi", {"bits": 4, "residual": 64}), ("kvquant", {})])
def test_keys_quantized_per_channel_do_not_mind_outlier_channels(
    models: dict[str, LoadedModel], name: str, params: dict[str, Any]
) -> None:
    """What the twin changes is a scale per channel: a range per channel sees the same keys up to rounding."""
    (right, here), (twin_right, there) = (answered(models[which], name, **params) for which in ("original", "twin"))
    assert right
    assert twin_right
    assert 0.01 < here["tv_max"] < 0.4
    assert there["tv_max"] == pytest.approx(here["tv_max"], rel=0.1)


def test_a_scale_per_head_saves_what_a_plain_cast_clips(models: dict[str, LoadedModel]) -> None:
    right, calibrated = answered(models["twin"], "fp8_calibrated")
    cast_right, cast = answered(models["twin"], "fp8_e4m3_cast")
    assert right
    assert not cast_right
    assert calibrated["tv_max"] < 0.3 * cast["tv_max"]


def test_a_rotation_spreads_outlier_channels_but_pays_for_them(models: dict[str, LoadedModel]) -> None:
    _, here = answered(models["original"], "rotated")
    right, there = answered(models["twin"], "rotated")
    assert right
    assert there["tv_max"] > 1.5 * here["tv_max"]


SIZES = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}


def model_of(family: str, **changes: Any) -> Any:
    config = getattr(transformers, family)(**{**SIZES, **changes})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    ("family", "changes", "dim", "interleaved", "mscale"),
    [
        ("LlamaConfig", {}, 16, False, 1.0),
        ("LlamaConfig", {"rope_parameters": YARN}, 16, False, 1.1386),
        ("GPTNeoXConfig", {"rotary_pct": 0.5}, 8, False, 1.0),
        ("CohereConfig", {}, 16, True, 1.0),
    ],
)
def test_tables_of_families(family: str, changes: dict[str, Any], dim: int, interleaved: bool, mscale: float) -> None:
    table = rotary_tables(model_of(family, **changes), {0: 16}, 64)(0)
    assert (table.spec.dim, table.spec.interleaved) == (dim, interleaved)
    assert torch.allclose(table.mscale(torch.arange(64)), torch.tensor(mscale), atol=1e-3)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("LlamaConfig", {"rope_parameters": {**YARN, "rope_type": "dynamic"}}, "type 'dynamic', which depend on"),
        ("GPT2Config", {"n_embd": 64, "n_layer": 1, "n_head": 4}, "has 0 rotary embeddings"),
    ],
)
def test_embeddings_without_one_table_are_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        rotary_tables(model_of(family, **changes), {0: 16}, 64)


def test_a_wrong_pairing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.cohere import modeling_cohere
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_cohere.apply_rotary_pos_emb)
    with pytest.raises(UnsupportedError, match="turns its keys otherwise than its table says"):
        rotary_tables(model_of("LlamaConfig"), {0: 16}, 64)
