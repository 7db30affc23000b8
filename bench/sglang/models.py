"""A model with random weights and heads of 128 channels: capacity and speed do not ask what it says.

`python bench/sglang/models.py DST` writes it, with the tokenizer of the shipped checkpoint.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from witcert_demo.run import CHECKPOINT

LAYERS, KV_HEADS = 4, 2


def wide_model(target: Path) -> Path:
    """A Llama of 4 layers, 8 query and 2 KV heads of 128 channels, 45 million weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=KV_HEADS,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_text((CHECKPOINT / name).read_text())
    return target


if __name__ == "__main__":
    wide_model(Path(sys.argv[1]))
