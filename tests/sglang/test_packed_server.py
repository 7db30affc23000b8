"""The packed INT8 cache in a running server: answers, certificates, and the tokens SGLang itself says it holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import SAME_DITHER, Metered, ask_many, check_recorded, samples_of_each_task, write_policy
from witcert_demo.servers import running_server

from witcert_core.cache.capacity import PASS_ID_BYTES
from witcert_core.evaluate.capacity import bytes_per_token, read_shape

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def packed_original(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metered]:
    work = tmp_path_factory.mktemp("packed")
    jsonl, log = work / "records.jsonl", work / "log"
    policy = write_policy(
        work / "policy.yaml",
        quantizer={"name": "int8_dither_w", "storage": "packed"},
        meter={"stride": 1, "audit_every": 1, "max_rows": 2},
        prefill_reads="stored",
        report={"jsonl": str(jsonl), "cells": "all"},
    )
    options = ["--dtype", "bfloat16", "--chunked-prefill-size", "128", "--enable-mixed-chunk"]
    with running_server(checkpoint, policy=policy, log=log, options=options, environment=SAME_DITHER) as server:
        yield Metered(server, jsonl)


def test_recorded(packed_original: Metered) -> None:
    check_recorded("int8_dither_w, packed", packed_original)


def test_answers_and_certificates(packed_original: Metered) -> None:
    asked = ask_many(packed_original.server, samples_of_each_task(6))
    assert sum(a.right for a in asked) >= 0.95 * len(asked)
    summaries = [a.summary for a in asked if a.summary is not None]
    assert len(summaries) == len(asked)
    measured = sum(s["cells_measured"] for s in summaries)
    assert sum(s["tv_certified_cells"] for s in summaries) >= 0.9 * measured > 0
    assert sum(s["audit"]["violations"] + s["audit"]["mismatches"] for s in summaries) == 0
    assert sum(s["audit"]["cells"] for s in summaries) > 100


def test_a_prefix_hit_reads_the_same_codes(packed_original: Metered) -> None:
    prompt = samples_of_each_task(1, seed=21)[2].prompt
    cold, warm = packed_original.generate(prompt), packed_original.generate(prompt)
    assert warm["meta_info"]["cached_tokens"] > 400 > cold["meta_info"]["cached_tokens"]
    assert warm["output_ids"] == cold["output_ids"]


def test_the_pool_is_what_the_status_says(packed_original: Metered) -> None:
    with packed_original.server.client() as client:
        status = client.get("/witcert/status").json()
    assert status["storage"] == "packed"
    assert status["bytes_packed_pool"] == 4 * 2 * (8192 + 1) * (2 * (64 + 4) + 2)


def wide_model(source: Path, target: Path) -> Path:
    """A random Llama with head_dim 128 and the tokenizer of `source`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=2048,
        torch_dtype="bfloat16",
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_text((source / name).read_text())
    assert json.loads((target / "config.json").read_text())["head_dim"] == 128
    return target


def test_capacity_at_equal_memory(checkpoint: Path, tmp_path: Path) -> None:
    """By SGLang's own account: tokens it holds and the bytes it says they take.

    Free memory differs between two starts, so the tokens are compared per byte that the server gave its pool.
    """
    model = wide_model(checkpoint, tmp_path / "wide")
    policy = write_policy(tmp_path / "policy.yaml", quantizer={"name": "int8_dither", "storage": "packed"})
    tokens_per_gb = {}
    for name, chosen, dtype in (("bf16", None, "bf16"), ("packed", policy, "auto")):
        options = ["--dtype", "bfloat16", "--kv-cache-dtype", dtype, "--mem-fraction-static", "0.2"]
        options += ["--max-total-tokens", "100000000"]
        with running_server(model, policy=chosen, log=tmp_path / name, options=options) as server:
            with server.client() as client:
                tokens = client.get("/server_info").json()["max_total_num_tokens"]
            found = re.search(r"#tokens: (\d+), K size: ([\d.]+) GB, V size: ([\d.]+) GB", server.log_text())
        assert found is not None
        assert int(found[1]) == tokens
        sizes = bytes_per_token({"bf16": "fp16", "packed": "int8_dither"}[name], read_shape(model))
        told = (float(found[2]) + float(found[3])) * 2**30 / tokens  # the pass ids are not SGLang's to tell
        assert sizes - (PASS_ID_BYTES if chosen else 0) == pytest.approx(told, rel=0.005)
        tokens_per_gb[name] = tokens / (float(found[2]) + float(found[3]))
    assert tokens_per_gb["packed"] / tokens_per_gb["bf16"] == pytest.approx(512 / 272, rel=0.01)


def test_a_gate_over_the_packed_pool(twin: Path, tmp_path: Path) -> None:
    """Codes in the pool, exact blocks beside it: the outlier twin is brought within target, and pays for it once."""
    policy = write_policy(
        tmp_path / "policy.yaml",
        quantizer={"name": "int8_dither", "storage": "packed"},
        meter={"audit_every": 1},
        gate={"kind": "combined", "target": "tv"},
    )
    options = ["--dtype", "float32", "--page-size", "16"]
    with running_server(twin, policy=policy, log=tmp_path / "log", options=options) as server:
        asked = ask_many(server, samples_of_each_task(1, num_tokens=192))
        prompt = samples_of_each_task(1, num_tokens=192, seed=81)[0].prompt
        _, warm, again = (Metered(server, tmp_path / "none").generate(prompt)["meta_info"] for _ in range(3))
    assert all(a.right for a in asked)
    summaries = [a.summary for a in asked if a.summary is not None]
    assert sum(s["audit"]["violations"] + s["audit"]["mismatches"] for s in summaries) == 0
    for summary in summaries:
        gate = summary["gate"]
        assert gate["repaired_blocks"] > 0
        assert gate["above_target"] == summary["cells_unknown"] == 0
        assert gate["bytes"] <= 4 * 2 * 2 * 64 * 4 * (192 + 16)  # layers, KV heads, K and V, channels, fp32, tokens
    assert warm["cached_tokens"] == again["cached_tokens"] > 100
    assert again["witcert"]["gate"]["bytes"] < warm["witcert"]["gate"]["bytes"]  # what was restored stays so


def test_outliers_in_sixteen_bit_certify_the_twin(twin: Path, tmp_path: Path) -> None:
    """The twin's outlier pairs stay out of the scales, and nearly every cell is certified as on the original."""
    policy = write_policy(
        tmp_path / "policy.yaml",
        quantizer={"name": "int8_dither_bypass", "storage": "packed", "params": {"pairs": 2}},
        meter={"stride": 1, "audit_every": 1, "max_rows": 2},
        prefill_reads="stored",
    )
    options = ["--dtype", "bfloat16", "--chunked-prefill-size", "128"]
    with running_server(twin, policy=policy, log=tmp_path / "log", options=options) as server:
        asked = ask_many(server, samples_of_each_task(2, num_tokens=256))
        with server.client() as client:
            status = client.get("/witcert/status").json()
    assert sum(a.right for a in asked) >= len(asked) - 1
    summaries = [a.summary for a in asked if a.summary is not None]
    measured = sum(s["cells_measured"] for s in summaries)
    assert sum(s["tv_certified_cells"] for s in summaries) >= 0.9 * measured > 0
    assert sum(s["audit"]["violations"] + s["audit"]["mismatches"] for s in summaries) == 0
    assert status["bytes_packed_pool"] == 4 * 2 * (8192 + 1) * (2 * (64 + 4) + 2 * 2 * 2)
