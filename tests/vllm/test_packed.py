"""The packed INT8 cache in vLLM's own pages: its bytes, its capacity, its answers and its bounds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import prompts
from engine import Answer, Engine, running_engine
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import SamplingParams
from witcert_vllm.packed import layout_of, packed_layer

from witcert_core.errors import UnsupportedError
from witcert_core.quantizers import REGISTRY
from witcert_core.report.claims import AFTER_ITS_ANSWER

pytestmark = pytest.mark.vllm

METER = {"stride": 1, "audit_every": 1, "max_rows": 4}


def policy(name: str, storage: str, reads: str = "chunk_exact", **sections: object) -> dict[str, object]:
    quantizer = {"name": name, "storage": storage}
    return {"quantizer": quantizer, "prefill_reads": reads, "meter": METER, **sections}


def assert_read_alike(found: dict[str, list[Answer]], rel: float) -> None:
    """Packed and simulated answers: same tokens, every packed cell audited, worst bounds within `rel`."""
    for packed, simulated in zip(found["packed"], found["simulated"], strict=True):
        assert packed.tokens == simulated.tokens
        ours, theirs = packed.summary, simulated.summary
        assert ours["audit"]["violations"] == ours["audit"]["mismatches"] == 0
        assert ours["audit"]["cells"] == ours["cells_measured"] == theirs["cells_measured"] > 0
        assert ours["worst"]["meter"] == pytest.approx(theirs["worst"]["meter"], rel=rel)


@pytest.mark.parametrize(("name", "reads"), [("int8_dither", "chunk_exact"), ("int8_dither_w", "stored")])
def test_packed_answers_and_bounds_are_those_of_the_simulation(
    checkpoint: Path, tmp_path: Path, name: str, reads: str
) -> None:
    """Dithers differ from run to run, so bounds are alike, not equal; answers are right, no audit is broken."""
    asked = prompts(seed=61, num_tokens=96)
    found = {}
    for storage in ("simulated", "packed"):
        with running_engine(checkpoint, tmp_path / storage, policy(name, storage, reads)) as engine:
            found[storage] = engine.ask(asked)
            assert_second_time_is_alike(engine, asked[0])
            if name == "int8_dither":
                assert_second_turn_claims_tier_w(engine, asked[1])
                assert_streaming_input_claims_tier_w(engine, asked[2])
            pages = engine.llm.collective_rpc("witcert_status")[0]
            assert ("bytes_packed_pool" in pages) == (storage == "packed")
    assert_read_alike(found, 0.3)


def test_codes_of_a_quantizer_s_own_are_read_as_they_were_simulated(checkpoint: Path, tmp_path: Path) -> None:
    """Nothing is drawn: answers are the same, bounds within rounding; 80 bytes a token and head, and 17 beside."""
    asked = prompts(seed=61, num_tokens=96)
    found, blocks = {}, {}
    for storage in ("simulated", "packed"):
        with running_engine(checkpoint, tmp_path / storage, policy("int4_token_group", storage)) as engine:
            found[storage] = engine.ask(asked)
            assert_second_time_is_alike(engine, asked[0])
            config = engine.llm.llm_engine.vllm_config.cache_config
            assert config.block_size == 128
            blocks[storage] = config.num_gpu_blocks
            status = engine.llm.collective_rpc("witcert_status")[0]
            assert ("bytes_packed_pool" in status) == (storage == "packed")
    assert_read_alike(found, 0.02)
    for storage, size in (("simulated", 512), ("packed", 80)):  # 17 of witness beside; 4 layers, 2 heads, a pass id
        assert blocks[storage] == (16 << 20) // (128 * (4 * 2 * (size + 17) + 8))


def assert_second_time_is_alike(engine: Engine, prompt: str) -> None:
    """A prefix hit reads packed pages of an earlier request."""
    cold, warm = (engine.ask([prompt])[0] for _ in range(2))
    assert warm.tokens == cold.tokens
    assert warm.summary["audit"]["violations"] == warm.summary["audit"]["mismatches"] == 0


def assert_second_turn_claims_tier_w(engine: Engine, prompt: str) -> None:
    """The next turn of a chat hits blocks that hold the sampled tokens of the first."""
    ids = engine.llm.get_tokenizer().encode(prompt)
    (first,) = engine.ask([{"prompt_token_ids": ids}], max_tokens=160, ignore_eos=True)
    (second,) = engine.ask([{"prompt_token_ids": ids + first.tokens + ids[-8:]}])
    assert second.cached > len(ids)
    assert (first.summary["tier"], second.summary["tier"]) == ("probabilistic", "deterministic")
    assert "its cached prefix holds tokens that were sampled" in second.summary["claim"]
    assert second.summary["tier_cells"] == {"deterministic": second.summary["cells_measured"]}
    assert second.summary["audit"]["violations"] == 0


def assert_streaming_input_claims_tier_w(engine: Engine, prompt: str) -> None:
    """Whoever streams a prompt may go on with it after an answer."""
    llm = engine.llm.llm_engine
    ids = {"prompt_token_ids": engine.llm.get_tokenizer().encode(prompt)}
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    tasks = llm.get_supported_tasks()
    request = llm.input_processor.process_inputs("session", ids, params, tasks, resumable=True)
    name = llm.add_request("session", request, params)
    for _ in range(6):
        llm.step()
    llm.abort_request([name], internal=True)
    llm.step()
    (summary,) = [r for r in engine.records() if r["request_id"] == name and r["schema"].startswith("witcert.request")]
    assert summary["tier"] == "deterministic"
    assert summary["cells_measured"] > 0
    assert AFTER_ITS_ANSWER in summary["claim"]


def test_a_prefix_is_shared_in_the_pass_that_computes_it(checkpoint: Path, tmp_path: Path) -> None:
    """vLLM hands the blocks of a prompt to an equal one of the same batch, before anything is in them."""
    (prompt,) = prompts(seed=65, num_tokens=256)[:1]
    gate = {"kind": "certified", "tau": 0.002, "target": "tv"}
    cases: dict[str, dict[str, Any]] = {"observe": {}, "gated": {"gate": gate}}
    for name, sections in cases.items():
        with running_engine(checkpoint, tmp_path / name, policy("int8_dither_w", "packed", **sections)) as engine:
            answers = engine.ask([prompt] * 3, ignore_eos=True)
        assert [answer.cached for answer in answers] == [0, 128, 128]
        assert len({tuple(answer.tokens) for answer in answers}) == 1
        for answer in answers:
            assert answer.summary["audit"]["violations"] == answer.summary["audit"]["mismatches"] == 0
            assert answer.summary["worst"]["meter"] < 0.2  # not 1: nothing is read that nobody wrote


def test_a_gate_repairs_over_packed_pages(checkpoint: Path, tmp_path: Path) -> None:
    gate = {"kind": "certified", "tau": 0.002, "target": "tv"}
    with running_engine(checkpoint, tmp_path, policy("int8_dither_w", "packed", gate=gate)) as engine:
        (answer,) = engine.ask(prompts(seed=62, num_tokens=128)[:1])
    assert answer.summary["gate"]["repaired_blocks"] > 0
    assert answer.summary["worst"]["meter"] <= 0.002
    assert answer.summary["audit"]["violations"] == answer.summary["audit"]["mismatches"] == 0


def wide_model(checkpoint: Path, path: Path) -> Path:
    """Random weights in bfloat16 with head_dim 128; the words of the trained model."""
    shutil.copytree(checkpoint, path, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 2048}
    LlamaForCausalLM(LlamaConfig(vocab_size=size, **shape)).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize(("name", "ratio"), [("int8_dither", 1.88), ("int8_dither_bypass", 1.77)])
def test_vllm_counts_that_many_more_tokens(checkpoint: Path, tmp_path: Path, name: str, ratio: float) -> None:
    model = wide_model(checkpoint, tmp_path / "wide")
    memory = 64 << 20
    options = {"dtype": "bfloat16", "kv_cache_memory_bytes": memory, "block_size": 32}
    plain = memory // (32 * 4 * 4 * 512)  # blocks of 32 tokens, 4 layers, 4 KV heads, 512 bytes
    with running_engine(model, tmp_path / "packed", policy(name, "packed", "stored"), **options) as engine:
        blocks = engine.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
        (answer,) = engine.ask(prompts(seed=63, num_tokens=64)[:1], ignore_eos=True)
    assert blocks / plain == pytest.approx(ratio, abs=0.01)
    assert answer.summary["audit"]["violations"] == answer.summary["audit"]["mismatches"] == 0
    assert 0 < answer.summary["audit"]["tv_max"] <= answer.summary["worst"]["meter"] < 1


@pytest.mark.parametrize(("name", "head_dim", "size"), [("int8_dither_w", 96, 207), ("int8_dither_bypass", 128, 288)])
def test_fields_of_a_layer_fill_its_memory_and_do_not_overlap(name: str, head_dim: int, size: int) -> None:
    layout = layout_of(REGISTRY.get(name), head_dim)
    assert layout.bytes_per_token_head == size
    blocks, block_size, heads = 3, 16, 2
    memory = torch.zeros(blocks, block_size, heads, size, dtype=torch.int8)
    layer = packed_layer(memory.transpose(1, 2), layout, torch.bfloat16)
    fields = [layer.k, layer.v, layer.k_scale, layer.v_scale, layer.k_witness, layer.k_bypass]
    kept = [field for field in fields if field is not None]
    assert all(field.is_contiguous() and field.shape[:2] == (blocks * block_size, heads) for field in kept)
    assert sum(field.nbytes for field in kept) == memory.numel()
    for number, field in enumerate(kept):
        field.view(torch.int8).fill_(number + 1)
    assert [int((memory == number + 1).sum()) for number in range(len(kept))] == [field.nbytes for field in kept]


def test_pages_that_do_not_lie_by_slot_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="lay its pages out by slot"):
        packed_layer(
            torch.zeros(3, 2, 16, 136, dtype=torch.int8), layout_of(REGISTRY.get("int8_dither"), 64), torch.half
        )
