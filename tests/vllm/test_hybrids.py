"""The families with recurrent layers that vLLM has classes for, against those that the SGLang adapter knows by name.

SGLang says of no class that it is a hybrid; vLLM does. A new one in its registry makes this fail, and asks for a
decision: does SGLang keep its states apart from its cache, or is the family refused there?
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import vllm
from vllm.model_executor.models.registry import ModelRegistry

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "adapters" / "sglang"))

from witcert_sglang.refusals.model import KEEP_STATES  # noqa: E402

REFUSED_IN_SGLANG = {
    "BailingMoeV2_5ForCausalLM",
    "BailingMoeV3ForCausalLM",
    "BailingMoeV3VLForConditionalGeneration",
    "JambaForCausalLM",
    "MiniCPMV4_6ForConditionalGeneration",
    "OlmoHybridForCausalLM",
    "Zamba2ForCausalLM",
}
"""What these keep beside a cache was not looked at in SGLang."""
NOT_GENERATING = {"ColBERTLfm2Model"}


def hybrids() -> Iterator[str]:
    """Architectures whose class names vLLM's `IsHybrid` among its bases: read, not imported, which takes minutes."""
    for architecture, model in ModelRegistry.models.items():
        place = Path(vllm.__file__).parents[1] / model.module_name.replace(".", "/")
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if "IsHybrid" not in (text := file.read_text(encoding="utf-8")):
            continue
        for node in ast.parse(text).body:
            bases = node.bases if isinstance(node, ast.ClassDef) and node.name == model.class_name else []
            if any(isinstance(base, ast.Name) and base.id == "IsHybrid" for base in bases):
                yield architecture


def test_every_hybrid_family_is_known_to_be_kept_or_refused_in_sglang() -> None:
    found = set(hybrids())
    kept = {name for name in found if any(family in name.replace("_", "").lower() for family in KEEP_STATES)}
    assert found - kept == REFUSED_IN_SGLANG | (NOT_GENERATING - kept)
    assert {"FalconH1ForCausalLM", "NemotronHForCausalLM", "Qwen3NextForCausalLM"} <= kept
