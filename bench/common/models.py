"""The models of a bench: the shipped one, its outlier twin, and one with heads of 128 channels and random weights.

Capacity and speed do not ask what the last one says. `python -m bench.common.models DST` writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from witcert_demo.run import CHECKPOINT, build_twin

from witcert_core.quantizers.layout import KVLayout

LAYERS, KV_HEADS, HEAD_DIM = 4, 2, 128

PACKED = {
    "int8_dither": KVLayout(HEAD_DIM),
    "int8_dither_w": KVLayout(HEAD_DIM, stored_witness=True),
    "int8_dither_bypass": KVLayout(HEAD_DIM, bypass_pairs=4),
}
"""Quantizers with a packed cache, and their bytes in the wide model."""


class Models:
    """Made in `work` when first asked for."""

    original = CHECKPOINT

    def __init__(self, work: Path) -> None:
        self.work = work

    @property
    def twin(self) -> Path:
        return self._made("twin", build_twin)

    @property
    def wide(self) -> Path:
        return self._made("wide", wide_model)

    def _made(self, name: str, make: Callable[[Path], Path]) -> Path:
        path = self.work / name
        return path if path.exists() else make(path)


def wide_model(target: Path) -> Path:
    """A Llama of 4 layers, 8 query and 2 KV heads of 128 channels, 45 million weights; the shipped tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_text((CHECKPOINT / name).read_text())
    return target


if __name__ == "__main__":
    wide_model(Path(sys.argv[1]))
