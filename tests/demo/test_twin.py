"""The outlier twin: the same function bit for bit, with keys beyond an 8-bit float."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from witcert_demo import NEEDLE_TINY
from witcert_demo.checkpoint import build_model, load_model, read_checkpoint
from witcert_demo.model import ModelConfig, TinyLlama, rotary_table
from witcert_demo.tasks import make_samples
from witcert_demo.training.offline import forward_cached
from witcert_demo.twin import BASE_SCALE, OUTLIER_PAIRS, OUTLIER_SCALE, main, outlier_twin, write_twin

FLOAT8_E4M3_MAX = 448.0
FLOAT16_MAX = 65504.0


@pytest.fixture(scope="module")
def models() -> tuple[TinyLlama, TinyLlama]:
    state_dict, config = read_checkpoint(NEEDLE_TINY)
    return build_model(state_dict, config), build_model(outlier_twin(state_dict, config), config)


def test_logits_keep_every_bit(models: tuple[TinyLlama, TinyLlama]) -> None:
    original, twin = models
    samples = make_samples("multi_query", 512, 4, seed=11)
    ids = torch.tensor([sample.prompt_ids + sample.answer_ids for sample in samples])
    with torch.no_grad():
        assert (original(ids) - twin(ids)).abs().max().item() == 0.0
    cached = [forward_cached(model, ids, 512, None).logits for model in models]
    assert (cached[0] - cached[1]).abs().max().item() == 0.0


def test_keys_leave_float8_but_stay_in_float16(models: tuple[TinyLlama, TinyLlama]) -> None:
    largest = [0.0, 0.0]
    for task in ("single_needle", "multi_key", "variable_tracking"):
        ids = torch.tensor([sample.prompt_ids for sample in make_samples(task, 1024, 8, seed=12)])
        for index, model in enumerate(models):
            done = forward_cached(model, ids, 1000, None)
            largest[index] = max(largest[index], done.max_abs_key)
    assert largest[0] < FLOAT8_E4M3_MAX < largest[1] < FLOAT16_MAX


def test_channels_of_a_pair_share_the_documented_scale(models: tuple[TinyLlama, TinyLlama]) -> None:
    config = models[0].config
    rotary = rotary_table(config, 7)
    x = torch.randn(1, 7, config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for mine, other in zip(models[0].layers(), models[1].layers(), strict=True):
            query, key, value = mine.self_attn.project(x, *rotary)
            twin_query, twin_key, twin_value = other.self_attn.project(x, *rotary)
            scale = torch.full((config.head_dim,), BASE_SCALE)
            for pair in OUTLIER_PAIRS:
                scale[[pair, pair + config.head_dim // 2]] *= OUTLIER_SCALE
            assert torch.equal(twin_key, key * scale)
            assert torch.equal(twin_query * scale, query)
            assert torch.equal(twin_value, value)


def test_scales_that_are_not_exact_are_refused() -> None:
    config = ModelConfig()
    state_dict = TinyLlama(config).state_dict()
    with pytest.raises(ValueError, match="base scale is 300"):
        outlier_twin(state_dict, config, base=300.0)
    with pytest.raises(ValueError, match="outlier scale is -2"):
        outlier_twin(state_dict, config, outlier=-2.0)
    with pytest.raises(ValueError, match=r"outlier pairs \[32\] do not exist"):
        outlier_twin(state_dict, config, outlier_pairs=(31, 32))
    with pytest.raises(ValueError, match=r"base scale is 2\.3"):
        outlier_twin(state_dict, config, base=2.0**61)


@pytest.mark.parametrize(("projection", "factor"), [("k_proj", 1e36), ("q_proj", 1e-36)])
def test_weights_that_would_overflow_or_lose_bits_are_refused(projection: str, factor: float) -> None:
    config = ModelConfig()
    state_dict = TinyLlama(config).state_dict()
    extreme = {name: tensor * factor if projection in name else tensor for name, tensor in state_dict.items()}
    with pytest.raises(ValueError, match=f"{projection}.weight does not survive"):
        outlier_twin(extreme, config)


def test_command_writes_the_twin_as_a_checkpoint(tmp_path: Path) -> None:
    main([str(NEEDLE_TINY), str(tmp_path / "twin")])
    state_dict, config = read_checkpoint(NEEDLE_TINY)
    written, written_config = read_checkpoint(tmp_path / "twin")
    assert written_config == config
    expected = outlier_twin(state_dict, config)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    assert not torch.equal(
        written["model.layers.0.self_attn.k_proj.weight"],
        state_dict["model.layers.0.self_attn.k_proj.weight"],
    )
    assert load_model(tmp_path / "twin").config == config


def test_a_checkpoint_in_bfloat16_has_a_twin_in_bfloat16(tmp_path: Path) -> None:
    state_dict, _ = read_checkpoint(NEEDLE_TINY)
    halved = {name: tensor.bfloat16() for name, tensor in state_dict.items()}
    shutil.copytree(NEEDLE_TINY, tmp_path / "original")
    save_file(halved, tmp_path / "original" / "model.safetensors")
    write_twin(tmp_path / "original", tmp_path / "twin", base=64.0, outlier=32.0)
    written, _ = read_checkpoint(tmp_path / "twin")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    name = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(written[name][30], halved[name][30] * 2048)  # a channel of an outlier pair, first head
    assert (tmp_path / "twin" / "tokenizer.json").read_bytes() == (NEEDLE_TINY / "tokenizer.json").read_bytes()
