"""The model in plain torch against Hugging Face's, its cached pass, and its training loop."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from demo_caches import quantized_cache
from torch import Tensor
from witcert_demo.checkpoint import load_model, read_checkpoint, write_checkpoint
from witcert_demo.model import ModelConfig, TinyLlama, rotary_table
from witcert_demo.tasks import TASKS
from witcert_demo.training.curriculum import SMOKE, num_steps
from witcert_demo.training.offline import forward_cached
from witcert_demo.training.train import main, smoke_recipe, train

from witcert_core.quantizers import QuantizerRegistry
from witcert_core.quantizers.cast import NoQuantizer


@pytest.fixture
def model() -> TinyLlama:
    torch.manual_seed(0)
    return TinyLlama(ModelConfig()).eval().requires_grad_(False)


def random_ids(batch: int, num_tokens: int) -> Tensor:
    return torch.randint(0, 320, (batch, num_tokens), generator=torch.Generator().manual_seed(1))


def test_hugging_face_loads_the_checkpoint_and_agrees(model: TinyLlama, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_checkpoint(tmp_path, model.state_dict(), model.config)
    theirs, report = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = random_ids(2, 130)
    with torch.no_grad():
        difference = (theirs(ids).logits - model(ids)).abs().max().item()
    assert difference < 2e-4
    assert model(ids).abs().max().item() > 0.1


def test_checkpoint_round_trip(model: TinyLlama, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, model.state_dict(), model.config)
    assert torch.equal(load_model(tmp_path)(random_ids(1, 9)), model(random_ids(1, 9)))
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["rope_theta"]  # as transformers 5 writes it
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert read_checkpoint(tmp_path)[1] == model.config
    (tmp_path / "config.json").write_text(json.dumps({**settings, "model_type": "gpt2"}))
    with pytest.raises(ValueError, match="model_type 'gpt2'"):
        read_checkpoint(tmp_path)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim is 63"):
        ModelConfig(head_dim=63)
    with pytest.raises(ValueError, match="num_attention_heads is 3"):
        ModelConfig(num_attention_heads=3)


def test_an_exact_cache_changes_nothing(model: TinyLlama) -> None:
    ids = random_ids(2, 40)
    done = forward_cached(model, ids, 33, None)
    assert done.total_variation.shape == (4, 2, 4, 7)
    assert done.total_variation.abs().max().item() == 0.0
    torch.testing.assert_close(done.logits, model(ids), rtol=0, atol=2e-5)


def test_only_answer_rows_read_the_cache(model: TinyLlama) -> None:
    ids = random_ids(1, 40)
    done = forward_cached(model, ids, 33, quantized_cache("int2_token_group", model.config))
    torch.testing.assert_close(done.logits[:, :33], model(ids)[:, :33], rtol=0, atol=2e-5)
    assert (done.logits[:, 33:] - model(ids)[:, 33:]).abs().max().item() > 1e-3
    assert done.total_variation.min().item() > 0.0


def test_total_variation_is_the_one_of_the_attention_weights(model: TinyLlama) -> None:
    """A cache that forgets all keys leaves uniform attention, whose distance from the exact one is known."""

    def forget_keys(x: Tensor, /, *, kind: str, layer: int, positions: Tensor) -> Tensor:
        return torch.zeros_like(x) if kind == "k" else x

    ids = random_ids(1, 12)
    done = forward_cached(model, ids, 11, forget_keys)
    first = model.layers()[0]
    rotary = rotary_table(model.config, 12)
    query, key, _ = first.self_attn.project(first.input_layernorm(model.model.embed_tokens(ids)), *rotary)
    for head in range(4):
        exact = (key[0, head // 2].double() @ query[0, head, 11].double() / 8).softmax(0)
        expected = 0.5 * (exact - 1 / 12).abs().sum().item()
        assert done.total_variation[0, 0, head, 0].item() == pytest.approx(expected, abs=1e-6)


def test_a_broken_cache_counts_as_damage(model: TinyLlama) -> None:
    def overflow(x: Tensor, /, *, kind: str, layer: int, positions: Tensor) -> Tensor:
        return torch.full_like(x, torch.inf)

    assert forward_cached(model, random_ids(1, 12), 10, overflow).total_variation.min().item() == 1.0
    with pytest.raises(ValueError, match="must keep shape and dtype"):
        forward_cached(model, random_ids(1, 12), 10, lambda x, **_: x.half())


def test_quantizers_the_evaluation_does_not_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown quantizer"):
        quantized_cache("int3", ModelConfig())

    @dataclass(frozen=True)
    class BeforeRotation(NoQuantizer):
        name = "before_rotation"
        space = "pre_rope"

    registry = QuantizerRegistry()
    registry.register(BeforeRotation)
    monkeypatch.setattr("demo_caches.REGISTRY", registry)
    with pytest.raises(ValueError, match="space 'pre_rope'; the offline evaluation takes"):
        quantized_cache("before_rotation", ModelConfig())


def test_training_resumes_to_the_same_weights_and_refuses_another_recipe(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    recipe = smoke_recipe(1)
    whole = train(recipe, tmp_path / "whole", stop_at=6)
    train(recipe, tmp_path / "broken", stop_at=3)
    resumed = train(recipe, tmp_path / "broken", resume=True, stop_at=6)
    assert resumed.step == whole.step == 6
    assert resumed.losses == whole.losses
    assert resumed.num_tokens == whole.num_tokens
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    with pytest.raises(ValueError, match="another recipe"):
        train(replace(recipe, seed=2), tmp_path / "broken", resume=True)


def test_smoke_run_learns_to_copy_and_leaves_a_checkpoint_with_its_record(tmp_path: Path) -> None:
    """Guessing among all symbols costs ln 300 = 5.7 nats; using the phrase at all brings it far below."""
    torch.set_num_threads(1)
    copying = train(smoke_recipe(0), tmp_path, stop_at=SMOKE[0].num_steps)
    assert sum(copying.losses[:5]) / 5 > 5.4
    assert sum(copying.losses[-5:]) / 5 < 4.5
    main(["--out", str(tmp_path), "--smoke", "--resume"])
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["num_steps"] == num_steps(SMOKE)
    assert record["seed"] == 0
    assert record["versions"]["torch"] == torch.__version__
    assert record["evaluation"]["accuracy_by_prompt_tokens"]["64"].keys() == set(TASKS)
    assert load_model(tmp_path).config == ModelConfig()
