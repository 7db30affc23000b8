"""Families whose every layer attends everything, with one KV head for one or several query heads."""

from __future__ import annotations

from tests.zoo.family import EXPERTS, ROUTED, Family, sizes

ALL = (0, 1)

FAMILIES: dict[str, Family] = {
    "chatglm": Family(
        "chatglm",
        {
            "num_layers": 2,
            "padded_vocab_size": 320,
            "vocab_size": 320,
            "hidden_size": 256,
            "ffn_hidden_size": 256,
            "kv_channels": 64,
            "num_attention_heads": 4,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "seq_length": 2048,
            "add_qkv_bias": True,
            "original_rope": True,
            "tie_word_embeddings": False,
        },
        ALL,
        architecture="ChatGLMModel",
    ),
    "ernie4_5_moe": Family(
        "ernie4_5_moe",
        sizes(
            head_dim=64,
            moe_intermediate_size=64,
            moe_k=2,
            moe_num_experts=4,
            moe_num_shared_experts=1,
            moe_layer_start_index=1,
            moe_layer_end_index=1,
            num_experts=4,
        ),
        ALL,
    ),
    "falcon": Family(
        "falcon", {**sizes(hidden_size=256), "num_kv_heads": 1, "multi_query": True}, ALL, engines=("vLLM",)
    ),
    "glm4_moe": Family(
        "glm4_moe",
        sizes(**ROUTED, head_dim=64, first_k_dense_replace=1, use_qk_norm=True, attention_bias=True),
        ALL,
        small=True,
    ),
    "gpt2": Family(
        "gpt2",
        {"vocab_size": 320, "n_positions": 2048, "n_embd": 256, "n_layer": 2, "n_head": 4, "bos_token_id": 1},
        ALL,
    ),
    "minimax_m2": Family(  # experts by softmax: vLLM's router for CPUs has no sigmoid with a bias
        "minimax_m2",
        sizes(
            head_dim=64,
            num_local_experts=4,
            num_experts_per_tok=2,
            rotary_dim=32,
            use_qk_norm=True,
            scoring_func="softmax",
            rms_norm_eps=1e-6,
            hidden_act="silu",
        ),
        ALL,
        architecture="MiniMaxM2ForCausalLM",
        engines=("vLLM",),  # SGLang has the norm of its queries and keys for GPUs alone
    ),
    "nemotron_nas": Family(
        "nemotron-nas",
        sizes(
            3,
            hidden_act="silu",
            rms_norm_eps=1e-6,
            attention_bias=False,
            mlp_bias=False,
            rope_theta=10000.0,
            block_configs=[
                {"attention": attention, "ffn": {"ffn_mult": 1.5, "no_op": False, "replace_with_linear": False}}
                for attention in (
                    {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
                    {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False},
                    {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
                )
            ],
        ),
        (0, 2),
        num_layers=3,
        architecture="DeciLMForCausalLM",
        engines=("vLLM",),
        options={"trust_remote_code": True},
        remote="configuration_decilm.DeciLMConfig",
    ),
    "phi": Family("phi", sizes(num_key_value_heads=4, hidden_size=320, partial_rotary_factor=0.4), ALL),
    "phi3": Family("phi3", sizes(hidden_size=256), ALL),
    "qwen2": Family("qwen2", sizes(hidden_size=256), ALL),
    "qwen2_5_vl": Family(
        "qwen2_5_vl",
        {
            "text_config": sizes(
                hidden_size=256,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
            ),
            "vision_config": {
                "depth": 1,
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_heads": 2,
                "out_hidden_size": 256,
                "fullatt_block_indexes": [0],
            },
            "image_token_id": 310,
            "video_token_id": 311,
            "vision_start_token_id": 312,
            "vision_end_token_id": 313,
        },
        ALL,
        options={"language_model_only": True},
    ),
    "qwen3_moe": Family("qwen3_moe", sizes(**EXPERTS, head_dim=64, num_experts=4), ALL, small=True),
    "qwen3_vl": Family(
        "qwen3_vl",
        {
            "text_config": sizes(
                head_dim=64,
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 5e6,
                    "mrope_section": [12, 10, 10],
                    "mrope_interleaved": True,
                },
            ),
            "vision_config": {
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_heads": 2,
                "out_hidden_size": 128,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            "image_token_id": 310,
            "video_token_id": 311,
            "vision_start_token_id": 312,
            "vision_end_token_id": 313,
        },
        ALL,
        options={"language_model_only": True},
    ),
    "smollm3": Family("smollm3", sizes(4, hidden_size=256), (0, 1, 2, 3)),
}
