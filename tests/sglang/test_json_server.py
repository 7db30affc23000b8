"""Answers bound to a JSON schema: valid against it, and every cell of them measured."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from byte_model import LAYERS, write_byte_model
from conftest import Metered, write_policy
from witcert_demo.servers import running_server

pytestmark = pytest.mark.sglang
HEADS = 4
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ada", "grace"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,3}$"}, "minItems": 2, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}


def test_json_by_a_schema(checkpoint: Path, tmp_path: Path) -> None:
    """Sampled at a temperature, beside free answers, with the overlap scheduler on."""
    jsonl = tmp_path / "records.jsonl"
    policy = write_policy(
        tmp_path / "policy.yaml",
        quantizer={"name": "int8_dither"},
        meter={"stride": 1, "audit_every": 1},
        report={"jsonl": str(jsonl)},
    )
    options = ["--dtype", "float32", "--load-format", "dummy", "--constrained-json-disable-any-whitespace"]
    model = write_byte_model(checkpoint, tmp_path / "model")
    with running_server(model, policy=policy, log=tmp_path / "log", options=options) as server:
        metered = Metered(server, jsonl)
        bound = {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 120, "temperature": 1.0}
        asked = [(f"Tell me about person {i}: ", bound) for i in range(4)]
        asked += [("Say something: ", {"max_new_tokens": 40, "temperature": 1.0, "ignore_eos": True})] * 2
        with ThreadPoolExecutor(len(asked)) as pool:
            replies = list(pool.map(lambda ask: metered.generate(ask[0], **ask[1]), asked))
    for reply in replies[:4]:
        jsonschema.validate(json.loads(reply["text"]), SCHEMA)
        assert reply["meta_info"]["finish_reason"]["type"] == "stop"
    with pytest.raises(ValueError):
        json.loads(replies[-1]["text"])  # the schema is what made the others valid
    for reply in replies:
        summary, generated = reply["meta_info"]["witcert"], reply["meta_info"]["completion_tokens"]
        assert summary["rows_metered"] == summary["rows_seen"] >= generated - 1
        assert summary["cells_unknown"] == 0
        assert summary["cells_measured"] == summary["audit"]["cells"] == summary["rows_seen"] * LAYERS * HEADS
        assert summary["audit"]["violations"] == summary["audit"]["mismatches"] == 0
