"""Families with multi-head latent attention (MLA).

Rows of 576 channels (512 of the latent, 64 of RoPE) as published: vLLM's CPU kernel takes no others.
"""

from __future__ import annotations

from typing import Any

from tests.zoo.family import ROUTED, Family, sizes

LATENT, ROPE = 512, 64
YARN_FACTOR = 4.0
_LATENT: dict[str, Any] = {
    **ROUTED,
    "num_key_value_heads": 4,
    "kv_lora_rank": LATENT,
    "qk_rope_head_dim": ROPE,
    "moe_layer_freq": 1,  # asked for by both engines
}
_DEEPSEEK: dict[str, Any] = {
    **_LATENT,
    "first_k_dense_replace": 2,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": YARN_FACTOR,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "rope_theta": 10000.0,
    },
}

FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(  # queries without a rank of their own, as V2-Lite
        "deepseek_v2", sizes(3, **_DEEPSEEK, q_lora_rank=None, scoring_func="softmax"), (0, 1, 2), dtype="bfloat16"
    ),
    "deepseek_v3": Family("deepseek_v3", sizes(**_DEEPSEEK, q_lora_rank=64), (0, 1)),
    "glm4_moe_lite": Family(  # heads of 192 channels without RoPE and values of 256, plain RoPE
        "glm4_moe_lite",
        sizes(
            **_LATENT,
            first_k_dense_replace=1,
            mlp_layer_types=["dense", "sparse"],
            qk_nope_head_dim=192,
            v_head_dim=256,
            q_lora_rank=64,
        ),
        (0, 1),
    ),
    "kimi_k2": Family("kimi_k2", sizes(**_DEEPSEEK, q_lora_rank=64), (0, 1), architecture="DeepseekV3ForCausalLM"),
}
