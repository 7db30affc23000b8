"""Families of models in SGLang's own model runner: every metered cell audited, every output compared with what is
stored. In this process, so that one family takes seconds; a few are served over HTTP in `test_families.py`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from in_process import running

from tests.zoo.families import FAMILIES, make_checkpoint, prompts
from witcert_core.policy.model import parse_policy

TOKENS = 6
sys.path.append(str(Path(__file__).with_name("absorbed")))  # first chunks over latents, as a server's plugin has them
POLICY = parse_policy(
    {
        "version": 1,
        "quantizer": {"name": "int4_token_group"},
        "meter": {"stride": 1, "audit_every": 1, "max_rows": 64},
    }
)
ELSEWHERE = ("gpt_oss", "gemma4")
"""Sinks and wide heads need Triton: see `test_families.py`."""
NAMES = [name for name, family in FAMILIES.items() if "SGLang" in family.engines and name not in ELSEWHERE]


@pytest.mark.parametrize("name", NAMES)
def test_bounds_and_outputs_hold(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    import_module("witcert_absorbed").load()
    asked = [prompt["prompt_token_ids"] for prompt in prompts()]
    options = {"load_format": "dummy"} if family.architecture else {}
    with running(make_checkpoint(name, tmp_path / "model"), POLICY, dtype=family.dtype, **options) as runner:
        summaries = runner.ask(asked, TOKENS)
    for summary in summaries:
        audit = summary["audit"]
        assert audit["violations"] == audit["mismatches"] == 0
        assert audit["outputs"] == audit["cells"] == summary["cells_measured"] + summary["cells_exact"]
        assert audit["cells"] == (TOKENS - 1) * len(family.attending) * 4
        assert summary["cells_unknown"] == 0
    # Whatever SGLang set for the model's own products; GLM-4.5's are TF32.
    assert torch.get_float32_matmul_precision() == "highest"
