"""Tiny checkpoints with random weights: one function a family of models, after its public configuration.

Kinds of layers, and how they attend, are the family's; sizes are the least that engines serve. Random weights suffice
to audit bounds and outputs; they say nothing about how tight a bound is. The vocabulary is the demonstration's.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from witcert_demo.run import CHECKPOINT

WINDOW = 32
"""Tokens of a sliding window, the row's own included."""


@dataclass(frozen=True)
class Family:
    """config: of Transformers, made anew. dtype: in which the engines here serve it. attending: ids of the layers that
    keep keys and values, of `num_layers`; windowed: those of them with a window."""

    config: Callable[[], Any]
    num_layers: int
    attending: tuple[int, ...]
    windowed: tuple[int, ...] = ()
    dtype: str = "float32"

    @property
    def without_cache(self) -> list[int]:
        return sorted(set(range(self.num_layers)) - set(self.attending))


def sizes(num_layers: int) -> dict[str, Any]:
    return {
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }


def _every(period: int, other: str, count: int = 4) -> list[str]:
    """Every `period`-th layer attends everything, the others are `other`."""
    return [other if (layer + 1) % period else "full_attention" for layer in range(count)]


_LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_MAMBA = {"mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 32, "mamba_d_conv": 4, "mamba_chunk_size": 64}


def gemma3() -> Any:
    """google/gemma-3: windows but for every sixth layer (here every third), norms of queries and keys."""
    return transformers.Gemma3TextConfig(
        **sizes(6),
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=WINDOW,
        layer_types=_every(3, "sliding_attention", 6),
    )


def gpt_oss() -> Any:
    """openai/gpt-oss: windows in every other layer, learned sinks in all, experts, YaRN."""
    return transformers.GptOssConfig(
        **sizes(4),
        head_dim=64,
        sliding_window=WINDOW,
        layer_types=_every(2, "sliding_attention"),
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    )


def mistral() -> Any:
    """mistralai/Mistral-7B-v0.1: a window in every layer."""
    return transformers.MistralConfig(**sizes(4), head_dim=64, sliding_window=WINDOW)


def qwen3_next() -> Any:
    """Qwen/Qwen3-Next: three layers of gated delta nets to one of gated attention, partial RoPE, experts."""
    return transformers.Qwen3NextConfig(
        **sizes(4),
        **_LINEAR,
        **EXPERTS,
        head_dim=64,
        layer_types=_every(4, "linear_attention"),
        num_experts=4,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        partial_rotary_factor=0.25,
    )


def falcon_h1() -> Any:
    """tiiuae/Falcon-H1: Mamba-2 and attention side by side in every layer."""
    return transformers.FalconH1Config(**sizes(2), **_MAMBA, head_dim=64, mamba_d_ssm=128, mamba_n_heads=4)


def granite4() -> Any:
    """ibm-granite/granite-4.0-h: Mamba-2 but for every fourth layer (as here), no positions."""
    return transformers.GraniteMoeHybridConfig(
        **sizes(4),
        **_MAMBA,
        layer_types=["mamba", "mamba", "mamba", "attention"],
        num_local_experts=0,
        shared_intermediate_size=128,
        mamba_n_heads=8,
        mamba_expand=2,
        position_embedding_type="nope",
    )


FAMILIES: dict[str, Family] = {
    "gemma3": Family(gemma3, 6, (0, 1, 2, 3, 4, 5), windowed=(0, 1, 3, 4)),
    "gpt_oss": Family(gpt_oss, 4, (0, 1, 2, 3), windowed=(0, 2)),
    "mistral": Family(mistral, 4, (0, 1, 2, 3), windowed=(0, 1, 2, 3)),
    "qwen3_next": Family(qwen3_next, 4, (3,), dtype="bfloat16"),
    "falcon_h1": Family(falcon_h1, 2, (0, 1)),
    "granite4": Family(granite4, 4, (3,)),
}


def make_checkpoint(name: str, directory: Path) -> Path:
    """A checkpoint of FAMILIES[name] in `directory`, the same for every call."""
    return save_family(FAMILIES[name].config(), directory)


def save_family(config: Any, directory: Path) -> Path:
    """A checkpoint of a configuration."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter, values in model.named_parameters():
            if "sinks" in parameter:
                values.normal_(0, 1)
            elif values.dim() >= 2 and "conv" not in parameter:
                values.normal_(0, 0.08)
    model.save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / file, directory)
    return directory


def prompts() -> list[dict[str, list[int]]]:
    """Token ids: longer than a window, and one in which another begins."""
    shapes = ((60, 7), (90, 7), (33, 9))
    return [{"prompt_token_ids": [1] + [3 + i * step % 300 for i in range(length)]} for length, step in shapes]
