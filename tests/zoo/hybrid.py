"""Families with layers, or halves of layers, that keep a recurrent state instead of keys and values."""

from __future__ import annotations

from typing import Any

from tests.zoo.family import EXPERTS, Family, every, sizes

_LINEAR: dict[str, Any] = {
    "head_dim": 64,
    "layer_types": every(4, "linear_attention"),
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "partial_rotary_factor": 0.25,
}
_SHARED: dict[str, Any] = {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64}
_MAMBA: dict[str, Any] = {
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 64,
}

_ENGINES = ("vLLM",)
"""SGLang's states are kept by kernels for GPUs, and for CPUs in a build that no package index has."""

FAMILIES: dict[str, Family] = {
    "falcon_h1": Family(  # Mamba-2 and attention side by side in every layer
        "falcon_h1",
        sizes(**_MAMBA, head_dim=64, mamba_d_ssm=128, mamba_n_heads=4),
        (0, 1),
        small=True,
        engines=_ENGINES,
    ),
    "granite4": Family(
        "granitemoehybrid",
        sizes(
            4,
            **_MAMBA,
            layer_types=["mamba", "mamba", "mamba", "attention"],
            num_local_experts=0,
            shared_intermediate_size=128,
            mamba_n_heads=8,
            mamba_expand=2,
            position_embedding_type="nope",
        ),
        (3,),
        num_layers=4,
        small=True,
        engines=_ENGINES,
    ),
    "jamba": Family(
        "jamba",
        sizes(
            4,
            attn_layer_period=4,
            attn_layer_offset=2,
            num_experts=4,
            num_experts_per_tok=2,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=16,
            mamba_dt_rank=8,
            use_mamba_kernels=False,
            hidden_size=256,
        ),
        (2,),
        num_layers=4,
        engines=(),  # vLLM has kernels of Mamba-1 for GPUs alone
    ),
    "kimi_linear": Family(
        "kimi_linear",
        sizes(
            4,
            num_key_value_heads=4,
            head_dim=32,
            moe_intermediate_size=64,
            num_experts=4,
            num_experts_per_token=2,
            num_shared_experts=1,
            first_k_dense_replace=1,
            moe_layer_freq=1,
            moe_router_activation_func="sigmoid",
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            mla_use_nope=True,
            linear_attn_config={
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
                "head_dim": 64,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
        ),
        (3,),
        num_layers=4,
        dtype="bfloat16",
        architecture="KimiLinearForCausalLM",
        engines=(),  # both have kernels for GPUs alone
    ),
    "lfm2": Family(
        "lfm2",
        sizes(
            4,
            hidden_size=256,
            block_dim=256,
            conv_dim=256,
            conv_L_cache=3,
            block_auto_adjust_ff_dim=False,
            layer_types=["conv", "conv", "full_attention", "conv"],
        ),
        (2,),
        num_layers=4,
        engines=_ENGINES,
    ),
    "nemotron_h": Family(
        "nemotron_h",
        sizes(
            head_dim=64,
            layers_block_type=["mamba", "mlp", "attention", "mlp"],
            num_hidden_layers=4,
            mamba_num_heads=4,
            mamba_head_dim=32,
            n_groups=1,
            ssm_state_size=32,
            chunk_size=64,
            use_mamba_kernels=False,
        ),
        (2,),
        num_layers=4,
        engines=_ENGINES,
    ),
    "qwen3_5": Family("qwen3_5_text", sizes(4, **_LINEAR), (3,), num_layers=4, dtype="bfloat16", engines=_ENGINES),
    "qwen3_5_moe": Family(
        "qwen3_5_moe_text", sizes(4, **_LINEAR, **_SHARED), (3,), num_layers=4, dtype="bfloat16", engines=_ENGINES
    ),
    "qwen3_next": Family(
        "qwen3_next",
        sizes(4, **_LINEAR, **_SHARED, decoder_sparse_step=1),
        (3,),
        num_layers=4,
        dtype="bfloat16",
        small=True,
        engines=_ENGINES,
    ),
}
