"""Families of models in real SGLang servers: every metered cell audited, every output compared with what is stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import write_policy
from witcert_demo.servers import running_server

from tests.zoo.families import FAMILIES, make_checkpoint, prompts

pytestmark = pytest.mark.sglang
INTERPRETED = {"TRITON_INTERPRET": "1"}


@pytest.mark.parametrize(
    ("name", "backend", "environment", "two_pools"),
    [
        ("gemma3", "torch_native", {}, False),  # SGLang keeps its layers in one pool
        pytest.param("gpt_oss", "triton", INTERPRETED, True, marks=pytest.mark.slow),
        pytest.param("gemma4", "triton", INTERPRETED, True, marks=pytest.mark.slow),
    ],
)
def test_bounds_and_outputs_hold(
    name: str, backend: str, environment: dict[str, str], two_pools: bool, tmp_path: Path
) -> None:
    policy = write_policy(
        tmp_path / "policy.yaml",
        quantizer={"name": "int4_token_group"},
        meter={"stride": 1, "audit_every": 1, "max_rows": 64},
    )
    model, family = make_checkpoint(name, tmp_path / "model"), FAMILIES[name]
    if name == "gemma4":
        flatten_gemma4(model / "config.json")
    options = ["--dtype", "float32", "--attention-backend", backend]
    with (
        running_server(model, policy=policy, log=tmp_path / "log", options=options, environment=environment) as server,
        server.client() as client,
    ):
        for asked in prompts()[:2]:  # the second begins with the first
            body = {
                "input_ids": asked["prompt_token_ids"],
                "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
            }
            answer = client.post("/generate", json=body, timeout=300)
            answer.raise_for_status()
            summary = answer.json()["meta_info"]["witcert"]
            audit = summary["audit"]
            assert audit["violations"] == audit["mismatches"] == 0
            assert audit["outputs"] == audit["cells"] >= 5 * len(family.attending) * 4
            assert summary["cells_unknown"] == 0
        assert ("SWAKVPool" in server.log_text()) == two_pools


def flatten_gemma4(file: Path) -> None:
    """SGLang reads one shape for layers with a window and one for the others; of published files, which have images as
    well, it makes them out of `per_layer_config` itself, of a model of texts alone it does not."""
    config = json.loads(file.read_text())
    (whole,) = {json.dumps(own) for own in config["per_layer_config"].values()}
    heads, width = config["num_key_value_heads"], config["head_dim"]
    swa = {"swa_num_key_value_heads": heads, "swa_head_dim": width, "swa_v_head_dim": width}
    file.write_text(json.dumps({**config, **swa, **json.loads(whole), "per_layer_config": None}))
