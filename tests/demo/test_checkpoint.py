"""The shipped checkpoint and its twin: what they get right, and which caches break which of them."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from demo_caches import bfloat16_cache, quantized_cache
from torch import Tensor
from witcert_demo import NEEDLE_TINY
from witcert_demo.checkpoint import build_model, load_model, read_checkpoint
from witcert_demo.model import TinyLlama
from witcert_demo.score import exact_match
from witcert_demo.tasks import TASKS, make_samples
from witcert_demo.training.offline import Evaluation, FakeQuantize, evaluate, evaluate_model, forward_cached
from witcert_demo.twin import outlier_twin

NUM_TOKENS = 512
SEED = 20250
STRICT_TASKS = ("single_needle", "multi_key", "variable_tracking")


@cache
def model_named(name: str) -> TinyLlama:
    state_dict, config = read_checkpoint(NEEDLE_TINY)
    return build_model(outlier_twin(state_dict, config) if name == "twin" else state_dict, config)


def cache_named(name: str) -> FakeQuantize | None:
    if name == "exact":
        return None
    return bfloat16_cache if name == "bfloat16" else quantized_cache(name, model_named("original").config)


def run(model: str, cache_name: str, task: str, count: int) -> Evaluation:
    torch.set_num_threads(1)
    return evaluate_model(
        model_named(model), cache_named(cache_name), task, num_tokens=NUM_TOKENS, count=count, seed=SEED
    )


@pytest.mark.parametrize("task", STRICT_TASKS)
@pytest.mark.parametrize(
    ("model", "cache_name"),
    [
        ("original", "exact"),
        ("original", "bfloat16"),
        ("original", "fp8_e4m3_cast"),
        ("twin", "bfloat16"),
        ("twin", "int8_token_group"),
        ("twin", "int8_dither"),
    ],
)
def test_what_keeps_answers_right(model: str, cache_name: str, task: str) -> None:
    outcome = run(model, cache_name, task, count=40)
    assert outcome.accuracy >= 0.95
    assert outcome.damaged_share <= 0.02


@pytest.mark.parametrize("task", STRICT_TASKS)
def test_float8_cast_breaks_the_twin(task: str) -> None:
    outcome = run("twin", "fp8_e4m3_cast", task, count=32)
    assert outcome.accuracy < 0.4
    assert outcome.damaged_share > 0.5


def test_int4_groups_damage_the_twin_and_spare_the_original() -> None:
    twin = [run("twin", "int4_token_group", task, count=32) for task in TASKS]
    original = [run("original", "int4_token_group", task, count=32) for task in TASKS]
    mean = {name: sum(o.accuracy for o in part) / len(part) for name, part in (("t", twin), ("o", original))}
    assert mean["o"] >= 0.9
    assert mean["t"] <= mean["o"] - 0.1
    assert min(outcome.damaged_share for outcome in twin) > 0.15
    assert max(outcome.damaged_share for outcome in original) < 0.1


def test_every_cache_entry_is_bfloat16_representable_in_the_twin_as_in_the_original() -> None:
    """Powers of two commute with rounding to bfloat16, so a 16-bit engine serves both alike."""
    samples = make_samples("multi_key", NUM_TOKENS, 2, seed=SEED)
    ids = torch.tensor([sample.prompt_ids + sample.answer_ids for sample in samples])
    original, twin = (
        forward_cached(model_named(name), ids, NUM_TOKENS, bfloat16_cache).logits for name in ("original", "twin")
    )
    assert torch.equal(original, twin)


def test_feeding_the_answer_scores_what_greedy_decoding_scores() -> None:
    """Token by token on the int4 twin, where both outcomes occur."""
    model, fake_quantize = model_named("twin"), cache_named("int4_token_group")
    samples = make_samples("multi_query", 256, 12, seed=SEED)
    outcomes = []
    for sample in samples:
        ids = list(sample.prompt_ids)
        while len(ids) < 256 + len(sample.answer_ids):
            done = forward_cached(model, torch.tensor([ids]), 256, fake_quantize)
            ids.append(int(done.logits[0, -1].argmax()))
        outcomes.append(exact_match(sample, ids[256:]))
    together = (
        evaluate(NEEDLE_TINY, None, "multi_query", num_tokens=256, count=12, seed=SEED),
        evaluate_model(model, fake_quantize, "multi_query", num_tokens=256, count=12, seed=SEED),
    )
    assert sum(outcomes) / 12 == together[1].accuracy
    assert together[1].accuracy < together[0].accuracy


def test_hugging_face_tokenizer_and_generation_agree() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(NEEDLE_TINY)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(NEEDLE_TINY, dtype=torch.float32)
    ours = load_model(NEEDLE_TINY)
    for task in STRICT_TASKS:
        for sample in make_samples(task, 200, 2, seed=SEED):
            ids: Tensor = tokenizer(sample.prompt, return_tensors="pt")["input_ids"]
            assert ids[0].tolist() == list(sample.prompt_ids)
            with torch.no_grad():
                assert (theirs(ids).logits - ours(ids)).abs().max().item() < 1e-3
                output = theirs.generate(ids, max_new_tokens=10)[0, 200:]
            assert exact_match(sample, output.tolist())
            assert tokenizer.decode(output) == sample.answer


def test_the_checkpoint_is_small_and_says_how_it_was_made() -> None:
    assert sum(path.stat().st_size for path in NEEDLE_TINY.iterdir()) <= 8e6
    record = json.loads((NEEDLE_TINY / "training.json").read_text())
    assert f"--seed {record['seed']} " in record["command"]
    assert record["num_parameters"] == sum(p.numel() for p in load_model(NEEDLE_TINY).parameters())
    assert record["num_steps"] > 0
    measured = record["evaluation"]["accuracy_by_prompt_tokens"]["512"]
    assert all(measured[task] >= 0.95 for task in STRICT_TASKS)
