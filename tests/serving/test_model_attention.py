"""What caches keys and values in a model, as its configuration says: published ones, and odd ones of our own making."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from witcert_core.errors import InputError, UnsupportedError, WitCertError
from witcert_core.serving.models.attention import ModelAttention, describe

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
PLAIN = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4}


def published(name: str) -> ModelAttention:
    return describe(json.loads((CONFIGS / name / "config.json").read_text()), name)


def described(**changes: Any) -> ModelAttention:
    return describe({**PLAIN, **changes}, "this model")


# Configuration -> (layers with a cache, layers with a window, 16-bit bytes a token), by the models' published numbers.
PUBLISHED = {
    "chatglm3": (28, 0, 28_672),
    "decilm_nemotron51b": (60, 0, 245_760),
    "deepseek_v3": (61, 0, 70_272),
    "gemma2_9b": (42, 21, 344_064),
    "gemma3_27b": (62, 52, 507_904),
    "gemma4_31b": (60, 50, 901_120),
    "glm46": (92, 0, 376_832),
    "gpt2": (12, 0, 36_864),
    "gpt_oss_120b": (36, 18, 73_728),
    "gpt_oss_120b_bf16": (36, 18, 73_728),
    "hd112": (28, 0, 100_352),
    "jamba": (4, 0, 16_384),
    "kimi_k2": (61, 0, 70_272),
    "llama31_8b": (32, 0, 131_072),
    "llama4_scout": (48, 36, 196_608),
    "minicpm_decoupled": (24, 0, 24_576),
    "minimax_text": (10, 0, 40_960),
    "mistral7b_v01": (32, 32, 131_072),
    "mistral_small31_vlm": (40, 0, 163_840),
    "mistral_small_24b": (40, 0, 163_840),
    "mqa_falcon7b": (32, 0, 8_192),
    "phi2": (32, 0, 327_680),
    "phi3mini": (32, 32, 393_216),
    "phi4": (40, 0, 204_800),
    "qwen25_7b": (28, 0, 57_344),
    "qwen25_vl_7b_flat": (28, 0, 57_344),
    "qwen3_30b_a3b": (48, 0, 98_304),
    "qwen3_next_80b": (12, 0, 24_576),
    "qwen3_next_80b_lt": (12, 0, 24_576),
    "smollm3_norope": (36, 0, 73_728),
}
REFUSED = {"mamba2": "keeps a state a request"}


def test_every_configuration_is_expected() -> None:
    assert {path.name for path in CONFIGS.iterdir()} == PUBLISHED.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_cache_what_their_numbers_say(name: str) -> None:
    found = published(name)
    of_values = 0 if found.latent_dim else 1  # which are read out of keys there
    size = sum(2 * layer.num_kv_heads * (layer.head_dim + of_values * layer.v_head_dim) for layer in found.layers)
    assert (len(found.layers), len(found.windows), size) == PUBLISHED[name]


def test_latents_are_one_row_a_token_whatever_the_heads() -> None:
    found = described(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128)
    assert found.shapes == {(1, 576, 512): 4}
    assert (found.latent_dim, found.rotary_dim) == (512, 64)
    assert found.kinds == {"mla"}
    assert found.rotary(576).parts["rope"] == slice(512, 576)
    with pytest.raises(UnsupportedError, match="latents"):
        found.refuse("mla")


@pytest.mark.parametrize("name", REFUSED)
def test_published_models_without_keys_and_values_per_head_have_their_own_reason(name: str) -> None:
    with pytest.raises(UnsupportedError, match=REFUSED[name]):
        published(name)


@pytest.mark.parametrize(
    ("changes", "attends"),
    [
        ({"layer_types": ["mamba", "attention", "mlp", "full_attention"]}, [1, 3]),
        ({"layers_block_type": ["attention", "mamba", "mamba", "hybrid"]}, [0, 3]),
        ({"block_types": ["recurrent", "attention"]}, [1, 3]),
        ({"hybrid_override_pattern": "M*-E"}, [1]),
        ({"attn_type_list": [0, 0, 1, 0]}, [2]),
        ({"full_attention_interval": 2, "linear_num_key_heads": 4}, [1, 3]),
        ({"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 16}, [2]),
        ({"attn_layer_indices": [3], "mamba_n_heads": 8}, [3]),
        ({"full_attn_idxs": [0, 2], "conv_L_cache": 3}, [0, 2]),
        ({"hybrid_layer_ids": [1], "mamba_d_state": 16}, [1]),
        ({"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}}, [3]),
        ({"block_configs": [{"attention": {"no_op": layer != 1, "n_heads_in_group": 4}} for layer in range(4)]}, [1]),
        ({"num_kv_shared_layers": 3}, [0]),
        ({"use_cla": True, "cla_share_factor": 2}, [0, 2]),
    ],
)
def test_layers_with_a_cache_under_any_name(changes: dict[str, Any], attends: list[int]) -> None:
    found = described(**changes)
    assert [layer.index for layer in found.layers] == attends
    with pytest.raises(UnsupportedError, match=r"KV cache|share the cache"):
        found.refuse("none", "state", "shared")


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 7}, [0, 1, 2, 3]),
        ({"sliding_window": 7, "use_sliding_window": False}, []),
        ({"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3}, [3]),
        ({"sliding_window": 7, "sliding_window_pattern": 2}, [0, 2]),
        ({"sliding_window": 7, "sliding_window_pattern": "LGGG"}, [0]),
        ({"sliding_window": 7, "hybrid_layer_pattern": [0, 1, 1, 0]}, [1, 2]),
        ({"sliding_window": None, "layer_types": ["sliding_attention"] * 4}, []),
        ({"attention_chunk_size": 8}, [0, 1, 2]),
        ({"attention_chunk_size": 8, "no_rope_layers": [0, 1, 0, 0]}, [1]),
        ({"attention_layers": ["global", "local"] * 2, "window_size": 256}, [1, 3]),
        ({"layers_block_type": ["attention"] * 4, "attention_window_size": 9}, [0, 1, 2, 3]),
    ],
)
def test_windows_under_any_name(changes: dict[str, Any], windows: list[int]) -> None:
    found = described(**changes)
    assert [layer.index for layer in found.windows] == windows
    assert len(found.layers) == 4


@pytest.mark.parametrize(
    ("changes", "shapes"),
    [
        ({}, {(2, 64, 64): 4}),
        ({"num_key_value_heads": None}, {(8, 64, 64): 4}),
        ({"multi_query": True}, {(1, 64, 64): 4}),
        ({"multi_query": True, "new_decoder_architecture": True, "num_key_value_heads": 4}, {(4, 64, 64): 4}),
        ({"multi_query_attention": True, "multi_query_group_num": 4, "kv_channels": 32}, {(4, 32, 32): 4}),
        (
            {"num_key_value_heads": None, "num_key_value_heads_per_layer": [1, 1, 1, 2]},
            {(1, 64, 64): 3, (2, 64, 64): 1},
        ),
        ({"num_key_value_heads": [1, 2, 2, 4]}, {(1, 64, 64): 1, (2, 64, 64): 2, (4, 64, 64): 1}),
        ({"num_key_value_heads": None, "attn_config": {"kv_n_heads": 4}}, {(4, 64, 64): 4}),
        ({"head_dim": 96, "v_head_dim": 64}, {(2, 96, 64): 4}),
        (
            {"sliding_window": 7, "sliding_window_pattern": 2, "swa_num_key_value_heads": 4, "swa_head_dim": 32},
            {(4, 32, 32): 2, (2, 64, 64): 2},
        ),
        (
            {"model_type": "mimo_v2_flash", "layer_types": ["full_attention", *["sliding_attention"] * 3]}
            | {"sliding_window": 7, "v_head_dim": 32},
            {(2, 64, 32): 1, (4, 64, 32): 3},
        ),
        ({"per_layer_config": {"02": {"head_dim": 128}}}, {(2, 64, 64): 3, (2, 128, 128): 1}),
    ],
)
def test_heads_and_widths_of_each_layer(changes: dict[str, Any], shapes: dict[tuple[int, int, int], int]) -> None:
    assert described(**changes).shapes == shapes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_lora_rank": 512, "index_topk": 2048}, "an index selects"),
        ({"layer_types": ["indexed_attention"] * 4}, "an index selects"),
        ({"compress_ratios": [1, 4, 128, 4]}, "compressed states"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"cross_attention_layers": [1]}, "cross-attention"),
        ({"num_attention_heads": None, "state_size": 16}, "keeps a state a request"),
        ({"layer_types": ["ssm"] * 4}, "type 'ssm'"),
        ({"hybrid_override_pattern": "M*X-"}, "'X'"),
        ({"layer_types": ["mamba"] * 4}, "no layer with a cache"),
        ({"mamba_d_state": 128}, "mamba_d_state speaks of recurrent layers"),
    ],
)
def test_what_is_no_cache_of_keys_and_values_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        described(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"gated_attention_layers": [1, 3]},
        {"swa_layer_schedule": "LLG"},
        {"attention_period": 4},
        {"linear_attention_every": 2},
        {"kv_heads_by_depth": [1, 2, 2, 1]},
        {"mixer_types": ["a", "b"]},
        {"num_kv_groups": 2},
        {"share_kv_with": [0, 0, 1, 1]},
        {"hybridLayerMap": [1, 0]},
    ],
)
def test_a_name_that_speaks_of_attention_and_is_not_known_is_refused_by_name(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(UnsupportedError, match=f"{name} .* not understood"):
        described(**changes)
    described(**{name: None})


def test_names_that_say_nothing_of_the_cache_pass() -> None:
    described(
        attention_bias=True,
        attention_dropout=0.1,
        attention_layer_norm_eps=1,
        attn_layer_offset_scale=0.5,
        use_cla=False,
        cla_share_factor=2,
        attn_logit_softcapping=50.0,
        num_attention_heads_per_layer=[8] * 4,
        no_rope_layers=[1, 1, 1, 0],
        mlp_layer_types=["dense"] * 4,
        vision_layer_types=["a"],
        mtp_layers_block_type=["attention"],
        moe_layer_freq=1,
        original_num_attention_heads=8,
        quantization_config={"kv_cache_scheme": None},
    )


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"architectures": ["DiffusionGemma"]}, "diffusion"),
        ({"architectures": ["LLaDA2MoeModelLM"]}, "diffusion"),
        ({"canvas_length": 256}, "diffusion"),
        ({"is_causal": False}, "bidirectional"),
        ({"use_bidirectional_attention": "all"}, "bidirectional"),
        ({"model_type": "hrm_text"}, "bidirectional"),
        ({"alibi": True}, "alibi"),
        ({"attn_config": {"alibi": True}}, "alibi"),
        ({"model_type": "bloom"}, "alibi"),
        ({"head_dim": 192, "v_head_dim": 128}, "widths"),
        ({"layer_types": ["hybrid"] * 4}, "state"),
    ],
)
def test_kinds_that_the_meter_does_not_follow_are_named(changes: dict[str, Any], kind: str) -> None:
    found = described(**changes)
    assert kind in found.kinds
    with pytest.raises(UnsupportedError, match=r"^this model .*; metered (are|is)"):
        found.refuse(kind)
    described().refuse(kind)


def test_a_language_part_is_found() -> None:
    for name in ("text_config", "llm_config", "language_config"):
        assert len(describe({name: PLAIN}, "x").layers) == 4
    assert len(describe({"thinker_config": {"text_config": PLAIN}}, "x").layers) == 4
    with pytest.raises(InputError, match="language part is empty"):
        describe({"text_config": None}, "x")


def test_objects_are_read_as_mappings_are() -> None:
    """As engines have them: attributes, some of which raise because they differ by layer."""

    class Varies(SimpleNamespace):
        @property
        def head_dim(self) -> int:
            raise RuntimeError("differs by layer")

    layers = [SimpleNamespace(**PLAIN, head_dim=128 if index == 2 else 64) for index in range(4)]
    assert describe(Varies(**PLAIN, per_layer_config=layers), "x").shapes == {(2, 64, 64): 3, (2, 128, 128): 1}
    top = SimpleNamespace(is_encoder_decoder=False, architectures=["M"])
    assert describe(top, "x", SimpleNamespace(**PLAIN)).shapes == {(2, 64, 64): 4}


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention"]},
        {"attn_type_list": "0001"},
        {"attn_type_list": [1]},
        {"block_configs": [{"attention": {"no_op": True}}]},
        {"full_attention_interval": 0.5},
        {"sliding_window": 7, "sliding_window_pattern": [1]},
        {"num_key_value_heads": [1, -2, 2, 1]},
        {"num_kv_shared_layers": 99},
        {"num_kv_shared_layers": "many"},
        {"attention_chunk_size": "x"},
        {"no_rope_layers": 7, "attention_chunk_size": 8},
        {"block_types": 3},
        {"linear_attn_config": 3},
        {"per_layer_config": [1]},
        {"per_layer_config": {"a": 1}},
        {"attn_layer_period": 4, "attn_layer_offset": "x"},
        {"attention_other_setting": 1, "sliding_window": 7},
        {"architectures": 7},
        {"attn_layer_indices": 4, "mamba_n_heads": 2},
        {"hybrid_override_pattern": "M"},
        {"block_configs": 7},
        {"block_configs": [1, 2, 3, 4]},
    ],
)
def test_an_odd_value_is_an_error_that_names_it(changes: dict[str, Any]) -> None:
    with pytest.raises(WitCertError, match="this model"):
        described(**changes)


def test_a_type_whose_every_layer_has_both_says_so_by_itself() -> None:
    found = described(model_type="falcon_h1", mamba_d_ssm=64)
    assert len(found.layers) == 4
    assert found.kinds == {"state"}
    with pytest.raises(UnsupportedError, match="mamba_d_ssm speaks of recurrent layers"):
        described(model_type="another", mamba_d_ssm=64)
