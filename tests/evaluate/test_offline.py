"""transformers under our attention: the model's own logits, and what the meter says of quantized ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch
import transformers
from demo_caches import quantized_cache
from witcert_demo.checkpoint import load_model as load_demo_model
from witcert_demo.run import CHECKPOINT
from witcert_demo.tasks import make_samples
from witcert_demo.training.offline import forward_cached

from witcert_core.errors import InputError, UnsupportedError
from witcert_core.evaluate.offline import bridge
from witcert_core.evaluate.offline.engine import OfflineEngine
from witcert_core.evaluate.offline.model import LoadedModel, check_config, load_model, wrap_model
from witcert_core.policy.model import Policy, parse_policy
from witcert_core.report.schema import load_schema
from witcert_core.report.text import render_sentence


def policy(name: str, **sections: Any) -> Policy:
    meter = {"stride": 1, "audit_every": 1, "max_rows": 64}
    return parse_policy({"version": 1, "quantizer": {"name": name}, "meter": meter, **sections})


SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "Qwen3Config": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7}
    | {"use_sliding_window": True},
    "MistralConfig": {"sliding_window": 5},
    "Gemma2Config": {"sliding_window": 6, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 20},
    "GptOssConfig": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 9},
    "GPTNeoXConfig": {"rotary_pct": 0.5, "num_key_value_heads": 4},
    "Gemma4TextConfig": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    | {"global_head_dim": 512, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 97},
    "MiMoV2FlashConfig": {"sliding_window": 8, "head_dim": 24, "v_head_dim": 16, "swa_num_key_value_heads": 4}
    | {"layer_types": ["full_attention", "sliding_attention"], "n_routed_experts": 2, "num_experts_per_tok": 1},
}
SHAPES = {"Gemma4TextConfig": {(2, 16, 16), (1, 512, 512)}, "MiMoV2FlashConfig": {(2, 24, 16), (4, 24, 16)}}
"""KV heads and channels of keys and values, of families whose layers differ in them."""


def random_model(family: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, family)(**{**SIZES, **FAMILIES[family]})
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_config(config, **options).eval()


def test_a_cache_is_given_under_the_name_that_this_transformers_has_for_it() -> None:
    assert bridge.cache_argument(SimpleNamespace(forward=lambda input_ids, cache=None: None)) == "cache"
    assert bridge.cache_argument(SimpleNamespace(forward=lambda past_key_values=None: None)) == "past_key_values"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exact_cache_gives_the_models_own_logits(family: str) -> None:
    model = random_model(family)
    ids = torch.randint(0, 97, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=ids).logits[0]
    shape = check_config(model.config, family)
    engine = OfflineEngine(wrap_model(model, None, shape, family), policy("none"), 64)
    engine._start("r", 40)
    parts = [engine.forward(ids[0, :20].tolist()), engine.forward(ids[0, 20:38].tolist(), attends_quantized=True)]
    parts += [engine.forward([int(ids[0, i])]) for i in (38, 39)]
    torch.testing.assert_close(torch.cat(parts), expected, atol=2e-5, rtol=2e-5)
    summary = engine.runtime.finish("r", "test")
    assert summary["rows_metered"] == 20
    assert summary["audit"]["violations"] == summary["audit"]["mismatches"] == 0
    assert summary["cells_exact"] == summary["audit"]["cells"] == 20 * 2 * 4
    assert summary["audit"]["tv_max"] < 1e-5


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize(
    "quantizer",
    [{"name": "int4_token_group"}, {"name": "int8_dither"}, {"name": "kvquant", "params": {"calibration_tokens": 16}}],
    ids=lambda quantizer: quantizer["name"],
)
def test_layers_of_several_shapes_are_metered(family: str, quantizer: dict[str, Any]) -> None:
    """Of keys before RoPE (kvquant) as well, by the tables of each type of layer."""
    model = random_model(family)
    loaded = wrap_model(model, None, check_config(model.config, family), family)
    engine = OfflineEngine(loaded, policy("", quantizer=quantizer), 64)
    groups = [group.geometry for group in engine.runtime.groups]
    assert {(of.num_kv_heads, of.head_dim, of.v_head_dim) for of in groups} == SHAPES[family]
    ids = [1 + i * 7 % 90 for i in range(60)]
    _, summary = engine.force("r", ids[:40], ids[40:])
    assert summary["audit"]["violations"] == summary["audit"]["mismatches"] == 0
    assert summary["cells_measured"] == summary["audit"]["cells"] == summary["audit"]["outputs"] == 19 * 2 * 4
    assert summary["audit"]["tv_max"] > 1e-5


@pytest.mark.parametrize(
    ("sections", "said"),
    [({"gate": {"kind": "combined"}}, "gate.kind"), ({"meter": {"stride": 1, "audit_share": 0.5}}, "audit_share")],
)
def test_what_needs_layers_of_one_shape_is_refused(sections: dict[str, Any], said: str) -> None:
    model = random_model("Gemma4TextConfig")
    loaded = wrap_model(model, None, check_config(model.config, "m"), "m")
    with pytest.raises(UnsupportedError, match=f"{said}.* with layers of 2 shapes"):
        OfflineEngine(loaded, policy("int8_dither", **sections), 64)


def test_quantized_answers_are_those_of_the_demonstrations_reference(original: LoadedModel) -> None:
    demo = load_demo_model(CHECKPOINT)
    (sample,) = make_samples("multi_query", 200, 1, 3)
    ids = torch.tensor([sample.prompt_ids + sample.answer_ids])
    cache = quantized_cache("int2_token_group", demo.config)
    expected = forward_cached(demo, ids[:, :-1], 200, cache).logits[0, 199:]
    engine = OfflineEngine(original, policy("int2_token_group"), 256)
    forced, summary = engine.force("r", sample.prompt_ids, sample.answer_ids)
    torch.testing.assert_close(forced, expected, atol=1e-3, rtol=1e-3)
    assert summary["rows_metered"] == len(sample.answer_ids) - 1
    assert summary["audit"]["cells"] == summary["cells_measured"] > 0 == summary["audit"]["violations"]


@pytest.mark.parametrize("name", ["int4_token_group", "kivi"])
def test_decoding_writes_what_forcing_expects(twin: LoadedModel, name: str) -> None:
    """`kivi` closes groups of 32 tokens while it decodes."""
    (sample,) = make_samples("variable_tracking", 251, 1, 5)
    engine = OfflineEngine(twin, policy(name), 300)
    answer = engine.generate("a", sample.prompt_ids, 16)
    logits, summary = engine.force("b", sample.prompt_ids, answer.ids)
    assert logits.argmax(-1).tolist() == answer.ids
    for forced, decoded in zip(summary["worst_by_layer_head"], answer.summary["worst_by_layer_head"], strict=True):
        assert forced == pytest.approx(decoded, rel=1e-4, abs=1e-4)  # compiled: errors in units of the tokens beside
    assert answer.summary["finish_reason"] == "stop"
    jsonschema.validate(answer.summary, load_schema("request"))
    assert answer.summary["engine"] == "offline"


def test_a_forced_answer_takes_a_pass_a_group_not_a_token(twin: LoadedModel) -> None:
    """And every row reads what it reads when the answer is fed in token by token."""
    (sample,) = make_samples("multi_key", 140, 1, 3)
    answer = (sample.prompt_ids * 2)[:101]
    engine = OfflineEngine(twin, policy("kivi"), 300)
    logits, summary = engine.force("a", sample.prompt_ids, answer)
    assert engine.runtime.passes <= 1 + 100 // 32 + 2
    alone = OfflineEngine(twin, policy("kivi"), 300)
    parts = [alone.forward(sample.prompt_ids)[-1:], *(alone.forward([token]) for token in answer[:-1])]
    one_by_one = alone.runtime.finish("", "forced")
    torch.testing.assert_close(logits, torch.cat(parts), atol=1e-3, rtol=1e-3)
    assert summary["cells_measured"] == one_by_one["cells_measured"]
    for mine, theirs in zip(summary["worst_by_layer_head"], one_by_one["worst_by_layer_head"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-4)


def test_rows_the_stride_leaves_out_are_unknown(original: LoadedModel) -> None:
    (sample,) = make_samples("multi_query", 200, 1, 3)
    engine = OfflineEngine(original, policy("int8_dither", meter={"stride": 4}), 256)
    answer = engine.generate("a", sample.prompt_ids, 14)
    summary = answer.summary
    assert summary["rows_seen"] == len(answer.ids) - 1 > 4
    assert summary["rows_metered"] == -(-summary["rows_seen"] // 4)
    assert summary["unknown_reasons"] == {"stride": summary["cells_unknown"]}
    assert summary["tier"] == "probabilistic"
    assert summary["deterministic_beside"]["cells"] == summary["cells_measured"]


def test_a_gate_makes_the_answer_right_again(twin: LoadedModel) -> None:
    sample = make_samples("multi_key", 256, 1, 3)[0]
    right = twin.decode(list(sample.answer_ids))
    raw = OfflineEngine(twin, policy("fp8_e4m3_cast"), 300).generate("a", sample.prompt_ids, 8)
    gated = OfflineEngine(twin, policy("fp8_e4m3_cast", gate={"kind": "certified"}), 300)
    repaired = gated.generate("a", sample.prompt_ids, 8)
    assert raw.text != right == repaired.text
    assert repaired.summary["gate"]["repaired_blocks"] > 0
    assert repaired.summary["tv_certified_share"] == 1.0
    assert repaired.summary["audit"]["violations"] == repaired.summary["audit"]["mismatches"] == 0
    again = gated.generate("b", sample.prompt_ids, 8)  # slots of a former request start anew
    assert again.summary["gate"] == repaired.summary["gate"]


def test_a_request_that_cannot_be_repaired_is_aborted_if_the_policy_says_so(twin: LoadedModel) -> None:
    (sample,) = make_samples("multi_key", 128, 1, 3)
    ends = {}
    for end in ("serve", "abort"):
        gate = {"kind": "certified", "max_pagein_bytes": 0, "on_exhausted": end}
        answer = OfflineEngine(twin, policy("fp8_e4m3_cast", gate=gate), 160).generate("a", sample.prompt_ids, 4)
        ends[end] = answer.summary["finish_reason"], len(answer.ids)
        assert answer.summary["gate"]["above_target"] > 0
    assert ends["abort"] == ("abort", 1)
    assert ends["serve"][0] in ("stop", "length")
    assert ends["serve"][1] > 1


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("kivi", "closes groups of 32 tokens and keeps the newest 96 exact"),
        ("skvq", "calibrates on the first 64 tokens and keeps the newest 128 exact"),
        ("kvquant", "calibrates on the first 64 tokens"),
        ("none", "every token they read was exact"),
    ],
)
def test_a_request_too_short_for_its_quantizer_is_exact_and_certifies_nothing(
    original: LoadedModel, name: str, waits: str
) -> None:
    (sample,) = make_samples("single_needle", 48, 1, 3)
    summary = OfflineEngine(original, policy(name), 64).generate("a", sample.prompt_ids, 8).summary
    jsonschema.validate(summary, load_schema("request"))
    assert summary["rows_seen"] > 0
    assert (summary["cells_measured"], summary["cells_unknown"]) == (0, 0)
    assert summary["cells_exact"] == summary["audit"]["cells"] == summary["rows_seen"] * 16
    assert summary["tv_certified_share"] is summary["worst"] is None
    assert summary["tokens_read"]["quantized"] == 0 < summary["tokens_read"]["exact"]
    text = render_sentence(summary)
    assert "nothing quantized was read yet: " in text
    assert waits in text


def test_cells_are_certified_once_they_read_a_closed_group(original: LoadedModel) -> None:
    """The same request before and after its first group is closed: exact cells first, measured ones then."""
    (sample,) = make_samples("single_needle", 120, 1, 3)
    engine = OfflineEngine(original, policy("kivi"), 140)
    prompt = sample.prompt_ids
    _, summary = engine.force("a", prompt, prompt[:16])
    exact = summary["cells_exact"] // 16
    assert 0 < exact == sum(position + 1 < 128 for position in range(len(prompt), len(prompt) + summary["rows_seen"]))
    assert summary["cells_measured"] == 16 * (summary["rows_seen"] - exact) > 0
    assert summary["tokens_read"]["quantized"] == 32 * summary["cells_measured"]


def test_layers_the_quantizer_leaves_out_are_exact(original: LoadedModel) -> None:
    (sample,) = make_samples("single_needle", 64, 1, 3)
    only = policy("int4_token_group", quantizer={"name": "int4_token_group", "layers": [1]})
    summary = OfflineEngine(original, only, 80).generate("a", sample.prompt_ids, 4).summary
    assert [layer["cells"] > 0 for layer in summary["by_layer"]] == [False, True, False, False]
    assert summary["worst_by_layer_head"][0] == ["exact"] * 4
    assert 3 * summary["cells_measured"] == summary["cells_exact"] > 0


def test_a_cell_that_reads_repaired_and_quantized_tokens_is_measured_and_one_of_repaired_ones_alone_is_exact(
    twin: LoadedModel,
) -> None:
    """An unreachable target: every block is restored, and then nothing is asked of the cells any more."""
    (sample,) = make_samples("single_needle", 64, 1, 3)
    for budget, status in ((None, "exact"), (40_000, "above_target")):
        gate = {"kind": "certified", "tau": 1e-9, "tau_out": 1e-9, "max_pagein_bytes": budget}
        engine = OfflineEngine(twin, policy("int2_token_group", gate=gate), 80)
        summary = engine.generate("a", sample.prompt_ids, 4).summary
        counts = summary["cells_measured"], summary["cells_exact"]
        assert counts == (summary["gate"]["above_target"], summary["gate"]["exact"])
        assert sum(counts) == summary["rows_seen"] * 16 > 0
        assert summary["gate"]["repaired_blocks"] > 0
        assert (summary["cells_measured"] == 0) == (status == "exact")
        assert summary["tokens_read"]["exact"] > 0
        assert summary["tv_certified_share"] == (None if status == "exact" else 0.0)


def test_prompt_rows_read_what_is_stored_when_the_policy_says_so(original: LoadedModel) -> None:
    (sample,) = make_samples("single_needle", 64, 1, 3)
    engine = OfflineEngine(original, policy("int4_token_group", prefill_reads="stored"), 128)
    assert engine.generate("a", sample.prompt_ids, 2).summary["rows_metered"] == 64 + 1


def test_what_cannot_be_metered_is_refused(original: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="outside a pass of the meter"):
        original.model(input_ids=torch.tensor([[1, 2]]))
    engine = OfflineEngine(original, policy("none"), 8)
    module, x = original.model.model.layers[0].self_attn, torch.zeros(1, 2, 3, 64)
    with bridge.running(engine.passes):
        with pytest.raises(UnsupportedError, match=r"passes \['position_bias'\]"):
            bridge.attention(module, x, x, x, None, position_bias=x)
        with pytest.raises(UnsupportedError, match="a mask of its own"):
            bridge.attention(module, x, x, x, x)
        with pytest.raises(UnsupportedError, match=r"dropout 0\.1"):
            bridge.attention(module, x, x, x, None, dropout=0.1)
    packed = parse_policy({"version": 1, "quantizer": {"name": "int8_dither", "storage": "packed"}})
    with pytest.raises(UnsupportedError, match="simulated"):
        OfflineEngine(original, packed, 8)
    with pytest.raises(InputError, match="has room for 8"):
        OfflineEngine(original, policy("none"), 8).generate("a", [1] * 8, 1)
    with pytest.raises(InputError, match="no model in"):
        load_model(str(tmp_path))
    with pytest.raises(InputError, match="dtype is 'int4'"):
        load_model(str(CHECKPOINT), "int4")
    with pytest.raises(UnsupportedError, match="chunked local attention"):
        check_config(transformers.LlamaConfig(**SIZES, layer_types=["chunked_attention"] * 2), "x")
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        check_config(transformers.T5Config(), "x")
