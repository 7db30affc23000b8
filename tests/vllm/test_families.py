"""Families of models in vLLM: every metered cell is audited, and every output compared with float64 attention over what
is stored, twice over the same prompts, so that the second time reads what the first has left in the cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine import running_engine
from vllm.model_executor.model_loader import dummy_loader
from witcert_vllm import process

from tests.zoo.families import FAMILIES, make_checkpoint, prompts, served_by_vllm
from tests.zoo.family import fill

SMALL = {"max_model_len": 512, "kv_cache_memory_bytes": 64 << 20}
TOKENS = 12
AUDITED = {"stride": 1, "audit_every": 1, "max_rows": 64}


def serve(name: str, work: Path, quantizer: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """The summaries of all prompts, asked twice in one batch each."""
    family, model = FAMILIES[name], make_checkpoint(name, work / "model")
    own = {**SMALL, "dtype": family.dtype, **family.options}
    if family.windowed:  # blocks smaller than the window leave it one by one
        own["block_size"] = 32
    if family.architecture:
        own["load_format"] = "dummy"
    policy = {"quantizer": quantizer, "meter": AUDITED}
    with running_engine(model, work, policy, **{**own, **options}) as engine:
        answers = [a for _ in range(2) for a in engine.ask(prompts(), max_tokens=TOKENS, ignore_eos=True)]
        runtime = process.runtime()
        left = {
            layer for group in runtime.groups if group.geometry.window is not None for layer in group.geometry.layers
        }
    assert runtime.status()["layers_without_cache"] == family.without_cache
    assert sorted(left) == list(family.windowed)
    return [answer.summary for answer in answers]


@pytest.fixture(autouse=True)
def weights_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint without weights gets such as the others are made with."""
    torch.manual_seed(0)
    monkeypatch.setattr(dummy_loader, "initialize_single_dummy_weight", fill)


@pytest.mark.parametrize("name", served_by_vllm())
def test_bounds_and_outputs_hold(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    for summary in serve(name, tmp_path, {"name": "int4_token_group"}):
        audit = summary["audit"]
        assert audit["violations"] == audit["mismatches"] == 0
        assert audit["outputs"] == audit["cells"] == summary["cells_measured"] + summary["cells_exact"]
        assert audit["cells"] >= (TOKENS - 1) * len(family.attending) * 4
        assert sorted(summary["layers_excluded"]) == [str(layer) for layer in family.without_cache]
        assert summary["cells_unknown"] == 0


def test_blocks_that_left_a_window_are_taken_again(tmp_path: Path) -> None:
    """Chunks of a prompt, few blocks, more requests than fit: slots of every group change hands all the time."""
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 3, "num_gpu_blocks_override": 40}
    for summary in serve("gemma3", tmp_path, {"name": "int8_dither"}, **options):
        audit = summary["audit"]
        assert audit["violations"] == audit["mismatches"] == 0
        assert audit["cells"] > 0


def test_without_the_hybrid_manager_every_token_stays(tmp_path: Path) -> None:
    """One group over all layers, whose windows are still followed; so a gate may repair."""
    model = make_checkpoint("gemma3", tmp_path / "model")
    policy = {"quantizer": {"name": "int4_token_group"}, "meter": AUDITED, "gate": {"kind": "combined", "tau": 0.2}}
    options = {**SMALL, "block_size": 32, "disable_hybrid_kv_cache_manager": True}
    with running_engine(model, tmp_path, policy, **options) as engine:
        answers = engine.ask(prompts(), max_tokens=8, ignore_eos=True)
        assert len(process.runtime().groups) == 1
    for summary in (answer.summary for answer in answers):
        assert summary["audit"]["violations"] == summary["audit"]["mismatches"] == 0
        assert summary["gate"]["repaired_blocks"] > 0


def test_without_the_hybrid_manager_shapes_share_a_block_table(tmp_path: Path) -> None:
    """One cache group of vLLM's, two of ours, and a slot is followed in both."""
    model = make_checkpoint("gemma4", tmp_path / "model")
    policy = {"quantizer": {"name": "int8_dither"}, "meter": AUDITED}
    options = {**SMALL, "block_size": 32, "disable_hybrid_kv_cache_manager": True}
    with running_engine(model, tmp_path, policy, **options) as engine:
        answers = [a for _ in range(2) for a in engine.ask(prompts(), max_tokens=8, ignore_eos=True)]
        runtime = process.runtime()
    assert [(of.geometry.num_kv_heads, of.geometry.head_dim) for of in runtime.groups] == [(2, 256), (1, 512)]
    assert runtime.tables == [0, 0]
    for audit in (answer.summary["audit"] for answer in answers):
        assert audit["violations"] == audit["mismatches"] == 0
        assert audit["outputs"] == audit["cells"] >= 7 * 4 * 4


@pytest.mark.parametrize(
    ("name", "quantizer", "section", "said"),
    [
        ("gpt_oss", {"name": "int8_dither"}, {"gate": {"kind": "combined"}}, "gate.kind: combined with layers whose"),
        ("mistral", {"name": "int8_dither", "storage": "packed"}, {}, "quantizer.storage: packed with layers whose"),
        ("granite4", {"name": "int8_dither", "storage": "packed"}, {}, "layers that keep a recurrent state"),
        ("gpt_oss", {"name": "int8_dither"}, {"meter": {"audit_share": 0.5}}, "meter.audit_share"),
        ("mimo_v2_flash", {"name": "int8_dither"}, {}, "keys and values of different widths"),
    ],
)
def test_what_is_not_followed_is_refused(
    name: str, quantizer: dict[str, Any], section: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model = make_checkpoint(name, tmp_path / "model")
    engine = running_engine(model, tmp_path, {"quantizer": quantizer, **section}, **SMALL)
    with pytest.raises(SystemExit, match=said):
        engine.__enter__()
