"""Tiny random checkpoints of families with multi-head latent attention (MLA), from what their public configurations
say of attention; hidden sizes, layers and experts are small.

Rows of 576 channels (512 of the latent, 64 of RoPE) as published: vLLM's CPU kernel takes no others.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from witcert_demo.run import CHECKPOINT

LATENT, ROPE = 512, 64
YARN_FACTOR = 4.0
_SMALL = {
    "vocab_size": 320,  # of the demonstration's tokenizer
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "kv_lora_rank": LATENT,
    "qk_rope_head_dim": ROPE,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,  # asked for by both engines
}
_YARN = {
    "rope_type": "yarn",
    "factor": YARN_FACTOR,
    "original_max_position_embeddings": 512,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "rope_theta": 10000.0,
}
_DEEPSEEK = _SMALL | {
    "first_k_dense_replace": 2,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_parameters": _YARN,
}


def deepseek_v2() -> Any:
    """DeepSeek V2: queries without a rank of their own (as V2-Lite), YaRN."""
    return transformers.DeepseekV2Config(**_DEEPSEEK, num_hidden_layers=3, q_lora_rank=None)


def deepseek_v3() -> Any:
    """DeepSeek V3, R1, V3.1 and Kimi K2: the scale holds the square of YaRN's factor."""
    return transformers.DeepseekV3Config(**_DEEPSEEK, num_hidden_layers=2, q_lora_rank=64)


def glm4_moe_lite() -> Any:
    """GLM-4.7-Flash: heads of 192 channels without RoPE and values of 256, plain RoPE, experts."""
    return transformers.Glm4MoeLiteConfig(
        **_SMALL,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        mlp_layer_types=["dense", "sparse"],
        qk_nope_head_dim=192,
        v_head_dim=256,
        q_lora_rank=64,
    )


FAMILIES: dict[str, Callable[[], Any]] = {
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "glm4_moe_lite": glm4_moe_lite,
}


def make(family: str, directory: Path, seed: int = 0) -> Path:
    """A checkpoint of `family` under `directory`: float32 weights that are large enough for weights of attention to
    differ, and the demonstration's tokenizer."""
    config = FAMILIES[family]()
    config.dtype = "float32"
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.08)
    path = directory / family
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / name, path)
    return path
