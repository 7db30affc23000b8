"""A pre-RoPE, calibrated and a grouped quantizer from plugins in real servers, with shared prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import Metered, ask_many, check_recorded, samples_of_each_task, write_policy
from sglang.srt.layers.radix_attention import RadixAttention
from witcert_demo.servers import running_server
from witcert_sglang.geometry import rotary_modules
from witcert_sglang.refusals.server import SERVER_ROWS, Server

from witcert_core.errors import UnsupportedError
from witcert_core.policy.model import parse_policy
from witcert_core.serving.refusals import refuse

pytestmark = pytest.mark.sglang


SERVED = [("kvquant", {"bits": 4}), ("kivi", {"bits": 4, "residual": 64})]


@pytest.fixture(scope="module", params=SERVED, ids=lambda served: served[0])
def plugged(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Metered]:
    name, params = request.param
    work = tmp_path_factory.mktemp(name)
    jsonl = work / "records.jsonl"
    policy = write_policy(
        work / "policy.yaml",
        quantizer={"name": name, "params": params},
        meter={"stride": 2, "audit_every": 1, "max_rows": 2},
        report={"jsonl": str(jsonl), "cells": "all"},
    )
    options = ["--dtype", "float32", "--page-size", "64", "--chunked-prefill-size", "256"]
    with running_server(checkpoint, policy=policy, log=work / "log", options=options) as server:
        yield Metered(server, jsonl)


def test_recorded(plugged: Metered, request: pytest.FixtureRequest) -> None:
    check_recorded(request.node.callspec.id, plugged)


def test_answers_audits_and_shared_prefixes(plugged: Metered) -> None:
    samples = samples_of_each_task(2)
    before = len(plugged.records())
    asked = ask_many(plugged.server, samples)
    assert sum(a.right for a in asked) >= len(asked) - 1
    again = plugged.generate(samples[0].prompt)
    assert again["meta_info"]["cached_tokens"] >= 384
    records = [r for r in plugged.records()[before:] if r["schema"].startswith("witcert.request")]
    assert len(records) == len(samples) + 1
    assert sum(record["audit"]["violations"] + record["audit"]["mismatches"] for record in records) == 0
    assert all(record["audit"]["cells"] > 0 for record in records)
    # Something was quantized: an exact cache has no bound above rounding.
    assert max(record["worst"]["meter"] for record in records) > 0.01


@pytest.mark.parametrize(("name", "unit"), [("kivi", 32), ("kvquant", 64), ("fp8_calibrated", 64), ("nvfp4", 1)])
def test_pages_that_would_split_a_group_are_refused(name: str, unit: int) -> None:
    (row,) = [row for row in SERVER_ROWS if "several tokens together" in row.what]
    policy = parse_policy({"version": 1, "quantizer": {"name": name}})

    def check(page_size: int, shares: bool) -> None:
        refuse([row], Server(SimpleNamespace(page_size=page_size, disable_radix_cache=not shares), policy))

    for page_size in (1, 16, 32, 64, 128):
        check(page_size, shares=False)
        if page_size % unit == 0:
            check(page_size, shares=True)
            continue
        said = f"takes {unit} tokens together, .* in units of {page_size}: .*--page-size that is a multiple of that"
        with pytest.raises(UnsupportedError, match=said):
            check(page_size, shares=True)


def test_the_rotary_embedding_beside_a_layer_is_found() -> None:
    layers = torch.nn.ModuleList([torch.nn.Module() for _ in range(2)])
    for number, layer in enumerate(layers):
        layer.attn = RadixAttention(1, 64, 0.1, num_kv_heads=1, layer_id=number)
    layers[1].rotary_emb = torch.nn.Identity()
    assert rotary_modules(layers, [0, 1]) == {0: None, 1: layers[1].rotary_emb}
