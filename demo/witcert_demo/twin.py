"""The outlier twin: the same function as a checkpoint, with keys no 8-bit float cast can hold.

``python -m witcert_demo.twin SRC DST`` reads the checkpoint in SRC and writes its twin to DST, everything else copied.

Attention sees keys only through ``<q, k>``. Multiplying both channels of a rotary pair of K by a power of two
and those of every query head of its group by the inverse commutes with the rotation and only moves exponents:
every product, sum and logit keeps its bits. The cache, though, now holds what large models grow on their own:
a few channel pairs far above the others.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from witcert_demo.checkpoint import StateDict, read_checkpoint
from witcert_demo.model import ModelConfig

BASE_SCALE = 256.0
"""All pairs: puts ordinary keys of this model beyond 448, the largest float8_e4m3 value."""

OUTLIER_SCALE = 16.0
"""On top of it for the outlier pairs; 32 would come within reach of 65504, the largest float16 value."""

OUTLIER_PAIRS = (30, 31)
"""The two slowest rotary pairs of head_dim 64, whose outliers keep their channel at every position."""


def pair_scales(config: ModelConfig, base: float, outlier: float, outlier_pairs: Collection[int]) -> Tensor:
    """Key scale [D] of every channel; channels i and i + D/2 form pair i.

    Raises ``ValueError`` for a scale that is no power of two (it would not be exact) or an unknown pair.
    """
    for name, scale in (("base", base), ("outlier", outlier)):
        if not 2.0**-60 <= scale <= 2.0**60 or math.frexp(scale)[0] != 0.5:
            raise ValueError(f"{name} scale is {scale}; only a power of two from 2^-60 to 2^60 is exact")
    num_pairs = config.head_dim // 2
    unknown = sorted(pair for pair in outlier_pairs if not 0 <= pair < num_pairs)
    if unknown:
        raise ValueError(f"outlier pairs {unknown} do not exist; head_dim {config.head_dim} has 0..{num_pairs - 1}")
    pairs = torch.full((num_pairs,), base)
    for pair in outlier_pairs:
        pairs[pair] = base * outlier
    return torch.cat([pairs, pairs])


def outlier_twin(
    state_dict: StateDict,
    config: ModelConfig,
    *,
    base: float = BASE_SCALE,
    outlier: float = OUTLIER_SCALE,
    outlier_pairs: Collection[int] = OUTLIER_PAIRS,
) -> StateDict:
    """A copy of ``state_dict`` with every key scaled by ``pair_scales`` and every query by the inverse.

    Raises ``ValueError`` where a weight would overflow or lose bits, so that a returned twin is exact.
    """
    scales = pair_scales(config, base, outlier, outlier_pairs)
    twin = {name: tensor.clone() for name, tensor in state_dict.items()}
    for layer in range(config.num_hidden_layers):
        for projection, factors, num_heads in (
            ("k_proj", scales, config.num_key_value_heads),
            ("q_proj", 1.0 / scales, config.num_attention_heads),
        ):
            name = f"model.layers.{layer}.self_attn.{projection}.weight"
            per_row = factors.repeat(num_heads)[:, None].to(state_dict[name].dtype)
            twin[name] = state_dict[name] * per_row
            if not torch.equal(twin[name] / per_row, state_dict[name]):
                raise ValueError(f"{name} does not survive scaling by {base} and {outlier}; take smaller scales")
    return twin


def write_twin(source: Path, target: Path, *, base: float = BASE_SCALE, outlier: float = OUTLIER_SCALE) -> None:
    """Write the twin of the checkpoint in `source` to `target`, in its dtype; all but the weights is copied.

    Raises ``ValueError`` as `read_checkpoint` and `outlier_twin` do.
    """
    twin = outlier_twin(*read_checkpoint(source), base=base, outlier=outlier)
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("model.safetensors"))
    save_file(twin, target / "model.safetensors", metadata={"format": "pt"})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m witcert_demo.twin", description=__doc__)
    parser.add_argument("source", type=Path, metavar="SRC", help="checkpoint directory to read")
    parser.add_argument("target", type=Path, metavar="DST", help="directory to write the twin to")
    options = parser.parse_args(arguments)
    write_twin(options.source, options.target)


if __name__ == "__main__":
    main(sys.argv[1:])
