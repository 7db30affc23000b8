"""A coded quantizer's bytes in a running server: answers, audits, shared prefixes, and the tokens SGLang counts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import Metered, ask_many, samples_of_each_task, write_policy
from witcert_demo.servers import running_server

from witcert_core.cache.capacity import PASS_ID_BYTES, coded_bytes
from witcert_core.evaluate.capacity import bytes_per_token, read_shape
from witcert_core.quantizers import REGISTRY

pytestmark = pytest.mark.sglang


def test_int4_in_the_pool_answers_and_is_audited(checkpoint: Path, tmp_path: Path) -> None:
    policy = write_policy(
        tmp_path / "policy.yaml",
        quantizer={"name": "int4_token_group", "storage": "packed"},
        meter={"stride": 1, "audit_every": 1, "max_rows": 2},
        prefill_reads="stored",
    )
    options = ["--dtype", "bfloat16", "--chunked-prefill-size", "128", "--enable-mixed-chunk"]
    with running_server(checkpoint, policy=policy, log=tmp_path / "log", options=options) as server:
        asked = ask_many(server, samples_of_each_task(2))
        metered = Metered(server, tmp_path / "none")
        prompt = samples_of_each_task(1, seed=21)[2].prompt
        cold, warm = metered.generate(prompt), metered.generate(prompt)
        with server.client() as client:
            status = client.get("/witcert/status").json()
    summaries = [a.summary for a in asked if a.summary is not None]
    assert len(summaries) == len(asked) == sum(a.right for a in asked)
    assert sum(s["audit"]["violations"] + s["audit"]["mismatches"] for s in summaries) == 0
    assert sum(s["audit"]["cells"] for s in summaries) > 100
    assert warm["meta_info"]["cached_tokens"] > 400 > cold["meta_info"]["cached_tokens"]
    assert warm["output_ids"] == cold["output_ids"]
    assert status["storage"] == "packed"
    assert status["bytes_packed_pool"] == 4 * 2 * (8192 + 1) * 80


def test_capacity_is_what_the_layout_says(checkpoint: Path, tmp_path: Path) -> None:
    """By SGLang's own account: tokens, and the bytes they take; what is kept beside them comes off its memory."""
    policy = write_policy(tmp_path / "policy.yaml", quantizer={"name": "int4_token_group", "storage": "packed"})
    tokens, told = {}, {}
    for name, chosen, dtype in (("bf16", None, "bf16"), ("packed", policy, "auto")):
        options = ["--dtype", "bfloat16", "--kv-cache-dtype", dtype, "--mem-fraction-static", "0.2"]
        options += ["--max-total-tokens", "100000000"]
        with running_server(checkpoint, policy=chosen, log=tmp_path / name, options=options) as server:
            found = re.search(r"#tokens: (\d+), K size: ([\d.]+) GB, V size: ([\d.]+) GB", server.log_text())
        assert found is not None
        tokens[name], told[name] = int(found[1]), (float(found[2]) + float(found[3])) * 2**30
    shape, heads = read_shape(checkpoint), 4 * 2
    size = sum(coded_bytes(REGISTRY.get("int4_token_group"), 64, 64)) * heads
    assert told["packed"] / tokens["packed"] == pytest.approx(size, rel=0.01)
    whole = bytes_per_token("packed:int4_token_group", shape)
    assert whole == size + 17 * heads + PASS_ID_BYTES
    # Free memory differs between two starts by little.
    expected = bytes_per_token("fp16", shape) / whole
    assert tokens["packed"] / tokens["bf16"] == pytest.approx(expected, rel=0.15)
